"""Forecast every window with a model and with seasonal naive, and score both. No torch itself."""

# B windows, H points of the horizon, Q quantile levels
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from steplab.errors import UserError
from steplab.studies.evaluation.evaluation import Evaluation, Scored, group_up, summaries
from steplab.studies.evaluation.metrics import Forecast, score
from steplab.studies.evaluation.sources import Source
from steplab.studies.evaluation.windows import Plan, Window, rolling_windows

CHUNK = 1024  # windows in memory at a time


class Predicted(Protocol):
    """What a model returns; see `engine.forecasting.Prediction`."""

    mean_BH: NDArray[np.float64]
    quantiles_BHQ: NDArray[np.float64] | None
    levels: tuple[float, ...]


Predict = Callable[[list[NDArray[np.float64]], int], Any]  # (contexts, horizon) -> Predicted


@dataclass(frozen=True)
class Example:
    """One window with the model's forecast, to be drawn."""

    window: Window
    forecast: Forecast


@dataclass(frozen=True)
class Outcome:
    """What was found, and the first window of every group."""

    evaluation: Evaluation
    examples: tuple[Example, ...]


def evaluate(predict: Predict, name: str, source: Source, plan: Plan) -> Outcome:
    """Score `predict`, a model called `name`, on the series of `source`."""
    scored: list[Scored] = []
    examples: dict[str, Example] = {}
    seconds, levels = 0.0, tuple[float, ...]()
    for windows in _chunks(rolling_windows(source, plan)):
        start = perf_counter()
        predicted = predict([window.context for window in windows], plan.horizon)
        seconds += perf_counter() - start
        levels = predicted.levels
        for window, forecast in zip(windows, _forecasts(predicted), strict=True):
            examples.setdefault(window.group, Example(window, forecast))
            scored.append(_score(window, forecast))
    if not scored:
        raise UserError(
            f"No series of {source.series.name} has {plan.horizon} points after 2 known ones.",
            "Use a smaller --horizon.",
        )
    groups = group_up(scored, source.unseen)
    evaluation = Evaluation(
        model=name,
        data=source.series.name,
        period=source.told,
        horizon=plan.horizon,
        windows=plan.windows,
        context=plan.context,
        levels=levels,
        left_out=len(source.series) - len({one.series for one in scored}),
        groups=groups,
        summaries=summaries(scored, groups),
        seconds=seconds,
    )
    return Outcome(evaluation, tuple(examples.values()))


def _chunks(windows: Iterator[Window]) -> Iterator[list[Window]]:
    while chunk := list(islice(windows, CHUNK)):
        yield chunk


def _forecasts(predicted: Predicted) -> Sequence[Forecast]:
    quantiles_BHQ = predicted.quantiles_BHQ
    if quantiles_BHQ is None:
        return [Forecast(mean_H) for mean_H in predicted.mean_BH]
    pairs = zip(predicted.mean_BH, quantiles_BHQ, strict=True)
    return [Forecast(mean_H, own_HQ, predicted.levels) for mean_H, own_HQ in pairs]


def _score(window: Window, forecast: Forecast) -> Scored:
    own, naive = (
        score(window.truth_H, one, window.scale) for one in (forecast, Forecast(window.naive_H))
    )
    return Scored(window.series, window.group, own, naive)
