"""evaluate: forecast every window with a model and with seasonal naive, and score both."""

# B windows, H points of the horizon, Q quantile levels
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from steplab.core.errors import UserError
from steplab.forecasting.evaluation.data import EVALUATION_SEED, EvaluationData
from steplab.forecasting.evaluation.metrics import (
    NAMES,
    Metrics,
    Sums,
    WindowForecast,
    metrics,
    score,
    total,
)
from steplab.forecasting.evaluation.windows import EvaluationPlan, EvaluationWindow, rolling_windows
from steplab.forecasting.prediction import Prediction

CHUNK = 1024  # windows in memory at a time
Predict = Callable[[list[NDArray[np.float64]], int], Prediction]  # (contexts, horizon)


@dataclass(frozen=True)
class SeriesGroup:
    """Series of one family or dataset."""

    name: str
    unseen: bool  # of a kind that is never trained on
    series: int
    windows: int
    without_scale: int  # windows whose seasonal error is 0 or unknown: they have no MASE
    model: Metrics
    naive: Metrics

    def ratio(self, metric: str) -> float:
        """Return model over seasonal naive; NaN if either is undefined or naive is 0."""
        return ratio(self.model, self.naive, metric)


@dataclass(frozen=True)
class Summary:
    """Several groups together, averaged in two ways.

    `model` and `naive` are over all windows as if they were one group, so groups with large errors
    weigh most. `geometric` is what GIFT-Eval reports: the geometric mean over groups of the ratio
    to seasonal naive, in which all groups weigh the same.
    """

    name: str
    groups: int
    windows: int
    model: Metrics
    naive: Metrics
    geometric: dict[str, float]  # mean ratio by metric; undefined ones are left out
    won: dict[str, int]  # groups in which the model is better, by metric

    def ratio(self, metric: str) -> float:
        """Return model over seasonal naive, over all windows."""
        return ratio(self.model, self.naive, metric)


@dataclass(frozen=True)
class Evaluation:
    """One model on one set of series."""

    model: str
    data: str
    period: str  # which periods seasonal naive used, in words
    horizon: int
    windows: int  # per series at most
    context: int  # points that the model saw at most
    levels: tuple[float, ...]  # quantiles that WQL averages; () for a point model
    left_out: int  # series without a window
    groups: tuple[SeriesGroup, ...]
    summaries: tuple[Summary, ...]  # the last one is over all groups
    conditions: str = ""
    seconds: float = 0.0  # spent forecasting

    @property
    def overall(self) -> Summary:
        """All groups together."""
        return self.summaries[-1]


@dataclass(frozen=True)
class Example:
    """One window with the model's forecast, to be drawn."""

    window: EvaluationWindow
    forecast: WindowForecast


@dataclass(frozen=True)
class EvaluationResult:
    """The evaluation, and the first window of every group."""

    evaluation: Evaluation
    examples: tuple[Example, ...]


def evaluate(
    predict: Predict, name: str, data: EvaluationData, plan: EvaluationPlan
) -> EvaluationResult:
    """Score `predict`, a model called `name`, on the series of `data`."""
    scored: list[ScoredWindow] = []
    examples: dict[str, Example] = {}
    seconds, levels = 0.0, tuple[float, ...]()
    for windows in _chunks(rolling_windows(data, plan)):
        start = perf_counter()
        predicted = predict([window.context for window in windows], plan.horizon)
        seconds += perf_counter() - start
        levels = predicted.levels
        for window, forecast in zip(windows, _forecasts(predicted), strict=True):
            examples.setdefault(window.group, Example(window, forecast))
            scored.append(_score(window, forecast))
    if not scored:
        raise UserError(
            f"No series of {data.series.name} has {plan.horizon} points after 2 known ones.",
            "Use a smaller --horizon.",
        )
    groups = group_windows(scored, data.unseen)
    evaluation = Evaluation(
        model=name,
        data=data.series.name,
        period=data.period_text,
        horizon=plan.horizon,
        windows=plan.windows,
        context=plan.context,
        levels=levels,
        left_out=len(data.series) - len({one.series for one in scored}),
        groups=groups,
        summaries=summaries(scored, groups),
        seconds=seconds,
    )
    return EvaluationResult(evaluation, tuple(examples.values()))


def check_held_out(checkpoint: Path) -> None:
    """Refuse a checkpoint that was trained on the generated series of the evaluation."""
    from steplab.train.checkpoint import read_progress  # imports torch
    from steplab.train.checkpoint_files import CHECKPOINT_FILE

    if not (checkpoint / CHECKPOINT_FILE).is_file():
        return  # not trained by steplab
    settings = read_progress(checkpoint).spec.get("settings", {})
    if not settings.get("dataset_path") and settings.get("seed") == EVALUATION_SEED:
        raise UserError(
            f"{checkpoint} was trained with the seed of the evaluation's series, "
            f"{EVALUATION_SEED}, so they are not held out.",
            "Give other series with --data, or train with another --seed.",
        )


@dataclass(frozen=True)
class ScoredWindow:
    """The error sums of one window."""

    series: int
    group: str
    model: Sums
    naive: Sums


def group_windows(
    scored: Sequence[ScoredWindow], unseen: frozenset[str]
) -> tuple[SeriesGroup, ...]:
    """Return the groups of the windows, in the order of their first windows."""
    members: dict[str, list[ScoredWindow]] = {}
    for one in scored:
        members.setdefault(one.group, []).append(one)
    return tuple(
        SeriesGroup(
            name=name,
            unseen=name in unseen,
            series=len({one.series for one in own}),
            windows=len(own),
            without_scale=sum(one.model.scaled_points == 0 for one in own),
            model=metrics(total(one.model for one in own)),
            naive=metrics(total(one.naive for one in own)),
        )
        for name, own in members.items()
    )


def summaries(scored: Sequence[ScoredWindow], groups: Sequence[SeriesGroup]) -> tuple[Summary, ...]:
    """Return one over all groups; before it, one of seen and one of unseen groups, if mixed."""
    seen = [group for group in groups if not group.unseen]
    unseen = [group for group in groups if group.unseen]
    parts = []
    if seen and unseen:
        parts.append(summarize("families trained on", scored, seen))
        parts.append(summarize("families never trained on", scored, unseen))
    return (*parts, summarize("all", scored, groups))


def summarize(name: str, scored: Sequence[ScoredWindow], groups: Sequence[SeriesGroup]) -> Summary:
    """Return the summary over `groups`; `scored` may hold windows of other groups too."""
    names = {group.name for group in groups}
    own = [one for one in scored if one.group in names]
    ratios = {metric: [group.ratio(metric) for group in groups] for metric in NAMES}
    return Summary(
        name=name,
        groups=len(groups),
        windows=len(own),
        model=metrics(total(one.model for one in own)),
        naive=metrics(total(one.naive for one in own)),
        geometric={metric: geometric_mean(values) for metric, values in ratios.items()},
        won={metric: sum(value < 1 for value in values) for metric, values in ratios.items()},
    )


def ratio(model: Metrics, naive: Metrics, metric: str) -> float:
    """Return model over naive; NaN if either is undefined or naive is 0."""
    own, reference = model.by_name()[metric], naive.by_name()[metric]
    return own / reference if reference > 0 else math.nan


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of the values that are not NaN; NaN if there are none."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return math.nan
    if min(known) == 0:
        return 0.0
    return math.exp(math.fsum(map(math.log, known)) / len(known))


def _chunks(windows: Iterator[EvaluationWindow]) -> Iterator[list[EvaluationWindow]]:
    while chunk := list(islice(windows, CHUNK)):
        yield chunk


def _forecasts(predicted: Prediction) -> Sequence[WindowForecast]:
    quantiles_BHQ = predicted.quantiles_BHQ
    if quantiles_BHQ is None:
        return [WindowForecast(mean_H) for mean_H in predicted.mean_BH]
    pairs = zip(predicted.mean_BH, quantiles_BHQ, strict=True)
    return [WindowForecast(mean_H, own_HQ, predicted.levels) for mean_H, own_HQ in pairs]


def _score(window: EvaluationWindow, forecast: WindowForecast) -> ScoredWindow:
    own, naive = (
        score(window.truth_H, one, window.scale)
        for one in (forecast, WindowForecast(window.naive_H))
    )
    return ScoredWindow(window.series, window.group, own, naive)
