import numpy as np
import pytest
import torch

import steplab
from steplab.core.errors import MeasurementError, UserError
from steplab.forecasting.forecaster import Forecaster
from steplab.forecasting.prediction import Prediction
from tests.forecasting.models import model
from tests.forecasting.trained import train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs") / "own")


def walk(points, seed=0):
    return np.cumsum(np.random.default_rng(seed).normal(size=points))


def test_it_is_a_public_name_and_loads_what_train_wrote(folder):
    assert steplab.Forecaster is Forecaster
    for path in (folder, str(folder / "step-00000002")):
        forecaster = Forecaster.load(path, device="cpu")
        assert forecaster.name.endswith("step-00000002") and forecaster.is_point_model
        found = forecaster.predict(walk(20), 16)
        assert isinstance(found, Prediction) and found.mean_BH.shape == (1, 16)
        assert found.quantiles_BHQ is None and found.levels == () and len(found) == 1


def test_the_default_is_the_newest_of_the_default_folder(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no checkpoint in checkpoints\. Make one with `steplab t"):
        Forecaster.load()
    (tmp_path / "checkpoints").symlink_to(folder)
    assert Forecaster.load().name == "checkpoints/step-00000002"


def test_a_time_moe_folder_loads(tmp_path):
    from safetensors.torch import save_file

    from steplab.workloads.tsmoe.time_moe import parameter_slices, render_config

    net = model(torch.float32, layout="time-moe")
    own = dict(net.named_parameters())
    tensors = {
        name: own[part.parameter][part.at].detach().clone().contiguous()
        for name, part in parameter_slices(net.config).items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    text = render_config(net.config)
    (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    series = walk(30)
    here, there = Forecaster(net).predict(series, 20), Forecaster.load(tmp_path).predict(series, 20)
    np.testing.assert_array_equal(here.mean_BH, there.mean_BH)


def test_recipes_for_predicting_are_taken_and_others_refused(folder):
    series = walk(20)
    plain = Forecaster.load(folder).predict(series, 16).mean_BH
    half = Forecaster.load(folder, recipe="precision=bf16").predict(series, 16).mean_BH
    assert 0 < abs(half - plain).max() < 0.1
    named = Forecaster.load(folder, recipe="impl.attention=reference,impl.experts=loop")
    np.testing.assert_allclose(named.predict(series, 16).mean_BH, plain, rtol=1e-4, atol=1e-5)
    for recipe in ("compile=blocks", "optimizer=fused"):
        with pytest.raises(UserError, match="recipe for forecasts cannot have"):
            Forecaster.load(folder, recipe=recipe)


def test_quantiles_of_a_model_that_has_them():
    forecaster = Forecaster(model(quantiles="0.1,0.5,0.9"))
    assert forecaster.levels == (0.1, 0.5, 0.9) and not forecaster.is_point_model
    every = forecaster.predict([walk(30), walk(9)], 20)
    assert every.quantiles_BHQ.shape == (2, 20, 3)
    assert (np.diff(every.quantiles_BHQ, axis=-1) >= 0).all()
    some = forecaster.predict([walk(30), walk(9)], 20, quantiles=[0.9, 0.1])
    assert some.levels == (0.1, 0.9)
    np.testing.assert_array_equal(some.quantiles_BHQ, every.quantiles_BHQ[..., [0, 2]])
    with pytest.raises(UserError, match=r"no quantile 0\.2\. It was trained for 0\.1, 0\.5, 0\.9"):
        forecaster.predict(walk(9), 1, quantiles=[0.2])


def test_a_point_model_says_that_it_is_one():
    with pytest.raises(UserError, match="This is a point model: it has no quantiles"):
        Forecaster(model()).predict(walk(9), 4, quantiles=[0.5])


def test_long_contexts_are_cut_with_one_warning():
    warnings = []
    forecaster = Forecaster(model(), warn=warnings.append)
    series = walk(300)
    found = forecaster.predict([series, walk(9)], 16).mean_BH
    forecaster.predict(series, 16)
    assert len(warnings) == 1 and "Some contexts are longer than 80 points" in warnings[0]
    np.testing.assert_allclose(found[0], forecaster.predict(series[-80:], 16).mean_BH[0])
    with pytest.warns(UserWarning, match="the last 80 are used"):
        Forecaster(model()).predict(series, 16)


def test_padding_is_no_long_context():
    rows = np.full((1, 500), np.nan)
    rows[0, -20:] = walk(20)
    Forecaster(model()).predict(rows, 4)  # a warning would fail


def test_forecasts_follow_the_unit_and_the_level_of_a_series():
    forecaster, series = Forecaster(model()), walk(40)
    plain = forecaster.predict(series, 20).mean_BH
    for scale, level in ((1e6, 0.0), (1e-8, 3e-8), (1.0, 1e7)):
        moved = forecaster.predict(series * scale + level, 20).mean_BH
        np.testing.assert_allclose((moved - level) / scale, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("value", [0.0, -3.5, 1e300, 7e-310])
@pytest.mark.parametrize("points", [1, 2, 50])
def test_constant_and_one_point_contexts_go_on_as_they_are(value, points):
    forecaster = Forecaster(model(quantiles="0.1,0.9"))
    found = forecaster.predict(np.full(points, value), 20)
    assert (found.mean_BH == value).all() and (found.quantiles_BHQ == value).all()


def test_missing_points_are_what_interpolation_makes_of_them():
    forecaster = Forecaster(model())
    series = walk(40)
    broken = series.copy()
    broken[:3] = np.nan
    broken[10], broken[20:22], broken[-2:] = np.nan, np.inf, np.nan
    found = forecaster.predict(broken, 8).mean_BH
    assert np.isfinite(found).all()
    # Scaled by hand with the known points, filled, and given as a series that scales to itself.
    known = np.isfinite(broken)
    places = np.arange(40)
    filled = np.interp(places, places[known], broken[known])[3:]
    mean, std = broken[known].mean(), broken[known].std()
    net = forecaster.model
    with torch.no_grad():
        out = net(torch.tensor(((filled - mean) / std)[None])).outputs_BNH[0, -1]
    first = out[1:5].numpy() * std + mean  # the head of 4 points
    np.testing.assert_allclose(found[0, :4], first, rtol=1e-10)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"horizon": 0}, "at least 1 point"), ({"batch": 0}, "batch must be at least 1")],
)
def test_bad_numbers_are_one_sentence(options, said):
    with pytest.raises(UserError, match=said):
        Forecaster(model()).predict(walk(9), **{"horizon": 4, **options})


def test_a_series_without_a_known_point_is_named():
    with pytest.raises(UserError, match="Series 'b' has no known point"):
        Forecaster(model()).predict([walk(4), [np.nan]], 4, names=["a", "b"])


def test_forecasts_that_are_not_finite_are_no_forecasts():
    net = model()
    with torch.no_grad():
        net.heads.weight[0, 0] = float("nan")
    with pytest.raises(MeasurementError, match=r"2 series are not finite \(first: 'a'\)"):
        Forecaster(net).predict([walk(4), walk(5)], 1, names=["a", "b"])


def test_other_models_are_refused(folder, monkeypatch):
    monkeypatch.setattr("steplab.forecasting.forecaster.Tsmoe", torch.nn.Linear)
    with pytest.raises(UserError, match="which forecasts no series"):
        Forecaster.load(folder)
