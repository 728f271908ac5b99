"""Metrics against numbers made by hand, plain loops, and what must hold for any data."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steplab.forecasting.evaluation.metrics import (
    WindowForecast,
    metrics,
    score,
    seasonal_error,
    total,
)
from steplab.forecasting.evaluation.windows import seasonal_naive

LEVELS = tuple(round(0.1 * number, 1) for number in range(1, 10))
NAN = math.nan


def array(*values):
    return np.array(values, np.float64)


def judge(truth, forecast, scale=1.0):
    forecast = forecast if isinstance(forecast, WindowForecast) else WindowForecast(forecast)
    return metrics(score(truth, forecast, scale))


# Seasonal error


def test_the_seasonal_error_by_hand():
    history = array(1, 5, 2, 9, 4)
    assert seasonal_error(history, 1) == (4 + 3 + 7 + 5) / 4
    assert seasonal_error(history, 2) == (1 + 4 + 2) / 3
    assert seasonal_error(history, 4) == 3


@pytest.mark.parametrize("period", [5, 6, 1000])
def test_a_period_without_a_pair_is_taken_as_1(period):
    history = array(1, 5, 2, 9, 4)
    assert seasonal_error(history, period) == seasonal_error(history, 1)


def test_missing_points_are_left_out_of_the_seasonal_error():
    assert seasonal_error(array(1, NAN, 4, 5), 1) == 1
    assert seasonal_error(array(1, NAN, 4, NAN), 2) == 3
    assert math.isnan(seasonal_error(array(1, NAN, 4), 1))


def test_a_series_that_repeats_itself_has_no_seasonal_error():
    wave = np.sin(2 * np.pi * np.arange(120) / 12) + 100
    assert (wave[12:] != wave[:-12]).any()  # in fp64 it repeats up to rounding only
    assert seasonal_error(wave, 12) == 0
    assert seasonal_error(np.zeros(20), 3) == 0
    assert seasonal_error(wave, 11) > 0


# Metrics by hand


def test_all_metrics_by_hand():
    truth, mean = array(1, 2, 4), array(2, 2, 1)
    found = judge(truth, mean, scale=0.5)
    assert found.mae == pytest.approx((1 + 0 + 3) / 3)
    assert found.mse == pytest.approx((1 + 0 + 9) / 3)
    assert found.mase == pytest.approx((1 + 0 + 3) / 3 / 0.5)
    assert found.smape == pytest.approx((2 / 3 + 0 + 6 / 5) / 3)
    assert found.wql == pytest.approx(4 / 7)  # ND


def test_quantile_loss_by_hand():
    forecast = WindowForecast(
        array(3, 3), np.array([[1.0, 3.0, 4.0], [2.0, 3.0, 9.0]]), (0.1, 0.5, 0.9)
    )
    # y = 2: 2(0.1*1), 2(0.5*1), 2(0.1*2); y = 10: 2(0.1*8), 2(0.5*7), 2(0.9*1)
    losses = (0.2 + 1 + 0.4) / 3 + (1.6 + 7 + 1.8) / 3
    assert judge(array(2, 10), forecast).wql == pytest.approx(losses / 12)


def test_absolute_errors_take_the_median_and_squares_the_mean():
    forecast = WindowForecast(array(5), np.array([[0.0, 1.0, 9.0]]), (0.1, 0.5, 0.9))
    found = judge(array(0), forecast)
    assert found.mae == 1 and found.mse == 25
    without_median = WindowForecast(array(5), np.array([[0.0, 9.0]]), (0.1, 0.9))
    assert judge(array(0), without_median).mae == 5


def test_the_point_in_all_nine_quantiles_gives_nd():
    truth, point = np.random.default_rng(0).normal(size=(2, 20))
    spread = WindowForecast(point, np.repeat(point[:, None], 9, 1), LEVELS)
    nd = np.abs(truth - point).sum() / np.abs(truth).sum()
    assert judge(truth, spread).wql == pytest.approx(nd)
    assert judge(truth, point).wql == pytest.approx(nd)


def test_missing_truth_is_left_out():
    whole = judge(array(1, 4), array(2, 1))
    assert judge(array(1, NAN, 4), array(2, 77, 1)) == whole


# What cannot be divided


def test_a_perfect_forecast_of_zeros():
    found = judge(np.zeros(4), np.zeros(4), scale=0.0)
    assert found.mae == found.mse == found.smape == 0
    assert math.isnan(found.mase) and math.isnan(found.wql)


def test_a_wrong_forecast_of_zeros():
    found = judge(np.zeros(2), array(1, -3), scale=0.0)
    assert found.smape == 2 and found.mae == 2


@pytest.mark.parametrize("scale", [0.0, NAN])
def test_windows_without_a_scale_have_no_part_in_mase(scale):
    good = score(array(1, 2), WindowForecast(array(2, 2)), 0.5)
    bare = score(array(7, 7), WindowForecast(array(0, 0)), scale)
    assert metrics(total([good, bare])).mase == metrics(good).mase == 1
    assert metrics(total([good, bare])).mae == (0.5 + 7) / 2


def test_no_windows_at_all():
    assert all(math.isnan(value) for value in metrics(total([])).by_name().values())


# Seasonal naive


def test_seasonal_naive_repeats_the_last_period():
    assert seasonal_naive(array(9, 1, 2, 3), 3, 7).tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert seasonal_naive(array(9, 1, 2, 3), 1, 2).tolist() == [3, 3]
    assert seasonal_naive(array(9, 1), 3, 2).tolist() == [1, 1]  # longer than the history


def test_seasonal_naive_fills_from_earlier_periods():
    history = array(1, 2, 3, 4, NAN, 6, NAN, NAN, 9)
    assert seasonal_naive(history, 3, 3).tolist() == [4, 2, 9]
    assert seasonal_naive(array(NAN, 5, NAN, 7), 2, 2).tolist() == [7, 7]
    assert seasonal_naive(array(NAN, NAN, 5, NAN), 2, 3).tolist() == [5, 5, 5]


def test_seasonal_naive_is_exact_on_a_season():
    season = np.random.default_rng(1).normal(size=7)
    history, truth = np.tile(season, 5), np.tile(season, 2)[:10]
    forecast = seasonal_naive(history, 7, 10)
    assert (forecast == truth).all()
    found = judge(truth, forecast, seasonal_error(history, 7))
    assert found.mae == 0 and found.smape == 0 and math.isnan(found.mase)


def test_mase_of_naive_on_a_random_walk_is_the_mean_distance_in_steps():
    # |y_(T+h) - y_T| of steps of +-1 against a seasonal error of 1.
    history = np.cumsum(np.resize([1.0, -1.0, -1.0, 1.0, 1.0], 50))
    truth = history[-1] + array(1, 2, 1, 0)
    forecast = seasonal_naive(history, 1, 4)
    assert judge(truth, forecast, seasonal_error(history, 1)).mase == 1


# What must hold for any data

points = st.lists(st.floats(-1e3, 1e3, width=32), min_size=3, max_size=30)


@settings(max_examples=60, deadline=None)
@given(points, st.integers(1, 8), st.integers(-8, 8), st.integers(0, 2**32 - 1))
def test_mase_and_smape_do_not_depend_on_the_unit(history, period, exponent, seed):
    history = np.array(history)
    truth, forecast = np.random.default_rng(seed).normal(size=(2, 5)) * 100
    unit = 2.0**exponent  # exact, so that equality is exact too
    plain = judge(truth, forecast, seasonal_error(history, period))
    scaled = judge(truth * unit, forecast * unit, seasonal_error(history * unit, period))
    assert scaled.mase == pytest.approx(plain.mase, nan_ok=True)
    assert scaled.smape == pytest.approx(plain.smape)
    assert scaled.wql == pytest.approx(plain.wql)
    assert scaled.mae == pytest.approx(plain.mae * unit)
    assert scaled.mse == pytest.approx(plain.mse * unit**2)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_metrics_match_plain_loops(seed, windows):
    random = np.random.default_rng(seed)
    sums, errors, scaled, symmetric, losses, sizes = [], [], [], [], [], []
    for _ in range(windows):
        truth, mean = random.normal(size=(2, 6))
        quantiles = np.sort(random.normal(size=(6, 9)), -1)
        scale = float(random.choice([0.0, 0.5, 2.0]))
        truth[random.random(6) < 0.2] = NAN
        sums.append(score(truth, WindowForecast(mean, quantiles, LEVELS), scale))
        for y, q in zip(truth, quantiles, strict=True):
            if math.isnan(y):
                continue
            e = abs(y - q[4])
            errors.append(e)
            symmetric.append(2 * e / (abs(y) + abs(q[4])))
            sizes.append(abs(y))
            scaled += [e / scale] if scale else []
            for level, value in zip(LEVELS, q, strict=True):
                gap = y - value
                losses.append(2 * (level * gap if gap > 0 else (level - 1) * gap) / 9)
    found = metrics(total(sums))
    if errors:
        assert found.mae == pytest.approx(np.mean(errors))
        assert found.smape == pytest.approx(np.mean(symmetric))
        assert found.wql == pytest.approx(sum(losses) / sum(sizes))
    if scaled:
        assert found.mase == pytest.approx(np.mean(scaled))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_order_of_series_does_not_matter(seed):
    random = np.random.default_rng(seed)
    sums = [
        score(random.normal(size=4), WindowForecast(random.normal(size=4)), random.random())
        for _ in range(20)
    ]
    shuffled = [sums[index] for index in random.permutation(20)]
    assert metrics(total(shuffled)) == metrics(total(sums))  # to the last bit


def test_gluonts_agrees():
    evaluation = pytest.importorskip("gluonts.ev.ts_stats")
    stats = pytest.importorskip("gluonts.ev.stats")
    random = np.random.default_rng(3)
    history, truth = random.normal(size=50).cumsum(), random.normal(size=8)
    quantiles = np.sort(random.normal(size=(8, 9)), -1)
    for period in (1, 7, 49, 60):
        theirs = float(evaluation.seasonal_error(history, period)[0])
        assert seasonal_error(history, period) == pytest.approx(theirs)
    scale = seasonal_error(history, 7)
    data = {"label": truth, "mean": quantiles.mean(-1), "seasonal_error": scale}
    data |= {str(level): quantiles[:, i] for i, level in enumerate(LEVELS)}
    found = judge(truth, WindowForecast(data["mean"], quantiles, LEVELS), scale)
    assert found.mase == pytest.approx(stats.absolute_scaled_error(data, "0.5").mean())
    assert found.smape == pytest.approx(
        stats.symmetric_absolute_percentage_error(data, "0.5").mean()
    )
    assert found.mse == pytest.approx(stats.squared_error(data, "mean").mean())
    losses = [stats.quantile_loss(data, level).sum() for level in LEVELS]
    assert found.wql == pytest.approx(np.mean(losses) / np.abs(truth).sum())
