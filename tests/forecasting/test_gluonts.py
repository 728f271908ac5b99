import sys
import types
from importlib.util import find_spec

import numpy as np
import pytest

pd = pytest.importorskip("pandas")

from steplab.core.errors import Unsupported, UserError
from steplab.forecasting.forecaster import Forecaster
from steplab.forecasting.gluonts_predictor import CHUNK_ENTRIES
from tests.forecasting.models import model


class SampleForecast:
    def __init__(self, samples, start_date, item_id=None):
        self.samples, self.start_date, self.item_id = samples, start_date, item_id
        self.mean = samples.mean(0)

    def quantile(self, level):
        return np.quantile(self.samples, float(level), axis=0)


class QuantileForecast:
    def __init__(self, forecast_arrays, start_date, forecast_keys, item_id=None):
        assert len(forecast_arrays) == len(forecast_keys)
        self.arrays = dict(zip(forecast_keys, forecast_arrays, strict=True))
        self.start_date, self.item_id = start_date, item_id
        self.mean = self.arrays["mean"]

    def quantile(self, level):
        return self.arrays[f"{level:g}"]


@pytest.fixture
def gluonts(monkeypatch):
    """gluonts itself where it is installed, else a stand-in with the classes that are made."""
    if find_spec("gluonts") is not None:
        return
    for name in ("gluonts", "gluonts.model", "gluonts.model.forecast"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    module = sys.modules["gluonts.model.forecast"]
    module.SampleForecast, module.QuantileForecast = SampleForecast, QuantileForecast


def entries(count, seed=0):
    generator = np.random.default_rng(seed)
    for index in range(count):
        target = np.cumsum(generator.normal(size=10 + index % 7)).astype(np.float32)
        yield {"start": pd.Period("2024-01-01", "D"), "target": target, "item_id": f"i{index}"}


def test_a_point_model_gives_one_sample(gluonts):
    forecaster = Forecaster(model())
    predictor = forecaster.gluonts(prediction_length=6)
    assert predictor.prediction_length == 6 and predictor.lead_time == 0
    data = list(entries(5))
    found = list(predictor.predict(data, num_samples=100))
    expected = forecaster.predict([entry["target"] for entry in data], 6).mean_BH
    for index, forecast in enumerate(found):
        assert forecast.item_id == f"i{index}"
        assert forecast.start_date == pd.Period("2024-01-01", "D") + 10 + index % 7
        assert forecast.samples.shape == (1, 6)
        for values in (forecast.mean, forecast.quantile(0.1), forecast.quantile(0.9)):
            np.testing.assert_allclose(values, expected[index])


def test_a_model_with_quantiles_gives_them(gluonts):
    forecaster = Forecaster(model(quantiles="0.1,0.5,0.9"))
    data = list(entries(3))
    expected = forecaster.predict([entry["target"] for entry in data], 6)
    for index, forecast in enumerate(forecaster.gluonts(6).predict(data)):
        np.testing.assert_allclose(forecast.mean, expected.mean_BH[index])
        for place, level in enumerate(expected.levels):
            np.testing.assert_allclose(
                forecast.quantile(level), expected.quantiles_BHQ[index, :, place]
            )


def test_a_dataset_is_a_stream(gluonts):
    """Entries are taken as they are needed, and come back in order."""
    taken = []

    def stream():
        for entry in entries(CHUNK_ENTRIES + 3):
            taken.append(entry["item_id"])
            yield {**entry, "target": entry["target"][:2]}

    found = Forecaster(model()).gluonts(1).predict(stream())
    assert next(found).item_id == "i0" and len(taken) == CHUNK_ENTRIES
    assert [forecast.item_id for forecast in found] == [
        f"i{i}" for i in range(1, CHUNK_ENTRIES + 3)
    ]


def test_many_channels_are_refused(gluonts):
    entry = {"start": pd.Period("2024-01-01", "D"), "target": np.zeros((2, 9)), "item_id": "m"}
    with pytest.raises(UserError, match="'m' has a target of 2 dimensions"):
        list(Forecaster(model()).gluonts(2).predict([entry]))
    with pytest.raises(UserError, match="at least 1 point"):
        Forecaster(model()).gluonts(0)


def test_without_gluonts_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "gluonts.model.forecast", None)
    with pytest.raises(Unsupported, match=r"pip install 'steplab\[gluonts\]'"):
        list(Forecaster(model()).gluonts(2).predict(entries(1)))
