"""Forecasts against a second implementation: one series, no cache, no padding, plain numpy."""

import numpy as np
import pytest
import torch

from steplab.forecasting.forecaster import Forecaster
from tests.forecasting.models import model

LENGTHS = (3, 17, 40, 40, 1, 64, 9)


def walks(lengths, seed=0):
    generator = np.random.default_rng(seed)
    return [np.cumsum(generator.normal(size=n)) * 7 + 100 for n in lengths]


def quiet(net, **options):
    return Forecaster(net, warn=lambda text: None, **options)


def by_hand(net, series, horizon, heads=(1, 4, 16)):
    """The largest head that is not longer than what remains, as the paper has it."""
    mean, std = series.mean(), series.std()
    values = list((series - mean) / std)
    while horizon:
        head = max(h for h in heads if h <= horizon)
        offset = sum(heads[: heads.index(head)])
        with torch.no_grad():
            out = net(torch.tensor([values], dtype=torch.float64)).outputs_BNH
        values += out[0, -1, offset : offset + head].tolist()
        horizon -= head
    return np.array(values[len(series) :]) * std + mean


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("horizon", [1, 6, 16, 37])
def test_ragged_batches_equal_series_by_hand(horizon, cached):
    net, series = model(), walks((3, 17, 40, 40, 2, 9))
    found = Forecaster(net).predict(series, horizon, cached=cached).mean_BH
    assert found.shape == (6, horizon)
    for row, one in zip(found, series, strict=True):
        np.testing.assert_allclose(row, by_hand(net, one, horizon), rtol=1e-11)


@pytest.mark.parametrize("options", [{}, {"patch_length": 4}, {"layout": "time-moe"}])
@pytest.mark.parametrize("horizon", [5, 48, 150])
def test_batched_one_by_one_cached_and_uncached_are_the_same(options, horizon):
    """150 points need several passes: more is fed back than the trained window holds."""
    forecaster = quiet(model(quantiles="0.1,0.5,0.9", **options))
    series = walks((3, 17, 1, 64))
    batched = forecaster.predict(series, horizon)
    assert len(forecaster.passes(150)) > 1
    for cached in (True, False):
        for index, one in enumerate(series):
            alone = forecaster.predict(one, horizon, cached=cached)
            np.testing.assert_allclose(alone.mean_BH[0], batched.mean_BH[index], rtol=1e-11)
            np.testing.assert_allclose(
                alone.quantiles_BHQ[0], batched.quantiles_BHQ[index], rtol=1e-11
            )


def test_in_fp32_batching_costs_no_more_than_rounding():
    """Budget: four times what fp32 itself is off from fp64, series by series."""
    series = walks(LENGTHS)
    exact = quiet(model()).predict(series, 48).mean_BH
    single = quiet(model(torch.float32))
    batched = single.predict(series, 48).mean_BH
    alone = np.concatenate([single.predict(one, 48, cached=False).mean_BH for one in series])
    budget = 4 * abs(alone - exact).max()
    assert 0 < budget < 1e-2
    assert abs(batched - exact).max() <= budget and abs(batched - alone).max() <= budget


def test_the_order_of_outputs_is_that_of_the_inputs():
    forecaster, series = Forecaster(model()), walks(LENGTHS)
    forward = forecaster.predict(series, 8).mean_BH
    order = [4, 2, 0, 6, 5, 3, 1]
    shuffled = forecaster.predict([series[i] for i in order], 8).mean_BH
    np.testing.assert_allclose(shuffled, forward[order], rtol=1e-11)


@pytest.mark.parametrize("batch", [1, 2, 3, 100])
def test_the_size_of_batches_changes_nothing(batch):
    forecaster, series = Forecaster(model()), walks(LENGTHS)
    seen = []
    found = forecaster.predict(series, 8, batch=batch, progress=seen.append)
    np.testing.assert_allclose(found.mean_BH, forecaster.predict(series, 8).mean_BH, rtol=1e-11)
    assert sum(seen) == len(series) and max(seen) <= batch


def test_padding_on_the_left_of_rows_is_not_seen():
    forecaster, series = Forecaster(model()), walks((5, 12))
    rows = np.full((2, 12), np.nan)
    rows[0, -5:], rows[1] = series
    np.testing.assert_allclose(
        forecaster.predict(rows, 20).mean_BH, forecaster.predict(series, 20).mean_BH, rtol=1e-11
    )


@pytest.mark.parametrize("points", [1, 2, 3, 5, 6, 79])
def test_contexts_that_fill_no_whole_token(points):
    forecaster = quiet(model(patch_length=4))
    (one,) = walks((points,))
    padded = np.concatenate([np.full(-points % 4, np.nan), one])
    found = forecaster.predict(one, 6).mean_BH
    np.testing.assert_allclose(found, forecaster.predict(padded, 6).mean_BH, rtol=1e-12)


def test_the_next_larger_head_is_cut():
    net, (series,) = model(), walks((30,))
    forecaster = Forecaster(net)
    long = forecaster.predict(series, 16).mean_BH
    assert forecaster.predict(series, 6, head="next-larger").mean_BH == pytest.approx(long[:, :6])
    assert forecaster.predict(series, 6).mean_BH != pytest.approx(long[:, :6])


def test_bf16_autocast_runs_and_stays_near():
    net, series = model(torch.float32), walks(LENGTHS)
    plain = Forecaster(net).predict(series, 20).mean_BH
    half = Forecaster(net, forward_context=lambda: torch.autocast("cpu", torch.bfloat16))
    spread = np.array([one.std() for one in series])[:, None] + 1e-9
    assert (abs(half.predict(series, 20).mean_BH - plain) / spread).mean() < 0.1


@pytest.mark.gpu
def test_gpu_equals_cpu():
    series = walks(LENGTHS)
    here = quiet(model()).predict(series, 48).mean_BH
    there = quiet(model().cuda()).predict(series, 48).mean_BH
    np.testing.assert_allclose(there, here, rtol=1e-9)
