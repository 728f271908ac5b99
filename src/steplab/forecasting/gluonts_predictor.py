"""A predictor for GluonTS: entries of a dataset in, Forecast objects out."""

# B entries, H points of the horizon, Q quantiles
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from steplab.core.errors import Unsupported, UserError
from steplab.forecasting.prediction import Prediction

if TYPE_CHECKING:
    from steplab.forecasting.forecaster import Forecaster

CHUNK_ENTRIES = 1024  # a dataset may not fit into memory


class GluonTSPredictor:
    """What GluonTS expects of a predictor, without its base class.

    A model with quantiles gives a QuantileForecast; a point model gives a SampleForecast with
    one sample, all of whose quantiles are that sample.
    """

    lead_time = 0

    def __init__(
        self, forecaster: Forecaster, prediction_length: int, options: Mapping[str, Any]
    ) -> None:
        forecaster.passes(prediction_length)  # refuses an impossible horizon
        self.forecaster = forecaster
        self.prediction_length = prediction_length
        self.options = dict(options)

    def predict(self, dataset: Iterable[Mapping[str, Any]], **ignored: Any) -> Iterator[Any]:
        """Yield one Forecast per entry {"target", "start", "item_id"}, in order.

        `ignored` is for callers that pass a number of samples to every predictor.
        """
        _need_gluonts()
        entries = iter(dataset)
        while some := list(islice(entries, CHUNK_ENTRIES)):
            targets = [_target(entry) for entry in some]
            names = [entry.get("item_id", index) for index, entry in enumerate(some)]
            prediction = self.forecaster.predict(
                targets, self.prediction_length, names=names, **self.options
            )
            for index, entry in enumerate(some):
                yield _forecast(prediction, index, entry, len(targets[index]))


def _need_gluonts() -> None:
    try:
        import gluonts.model.forecast  # noqa: F401
    except ImportError as error:
        raise Unsupported(
            f"Forecast objects need gluonts, which cannot be imported ({error}).",
            "pip install 'steplab[gluonts]'",
        ) from None


def _target(entry: Mapping[str, Any]) -> Any:
    target = np.asarray(entry["target"], np.float64)
    if target.ndim != 1:
        raise UserError(
            f"Entry {entry.get('item_id', '')!r} has a target of {target.ndim} dimensions.",
            "The model forecasts single series: split the target into one entry per channel.",
        )
    return target


def _forecast(prediction: Prediction, index: int, entry: Mapping[str, Any], length: int) -> Any:
    from gluonts.model.forecast import QuantileForecast, SampleForecast

    start, name = entry["start"] + length, entry.get("item_id")
    mean_1H = prediction.mean_BH[index][None]
    if prediction.quantiles_BHQ is None:
        return SampleForecast(mean_1H, start_date=start, item_id=name)
    arrays_QH = np.concatenate([mean_1H, prediction.quantiles_BHQ[index].T])
    keys = ["mean", *(f"{level:g}" for level in prediction.levels)]
    return QuantileForecast(arrays_QH, start_date=start, forecast_keys=keys, item_id=name)
