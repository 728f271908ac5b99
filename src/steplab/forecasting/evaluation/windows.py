"""Rolling windows at the end of each series, and the seasonal naive forecast of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steplab.core.errors import UserError
from steplab.forecasting.evaluation.data import EvaluationData
from steplab.forecasting.evaluation.metrics import seasonal_error

HistoryPoints = NDArray[np.float64]


def seasonal_naive(history: HistoryPoints, period: int, horizon: int) -> HistoryPoints:
    """Repeat the last period of `history` [points] over `horizon` points.

    A missing point is taken from the last period in which it is known, or else from the last
    known point. A period longer than the history is taken as 1. Needs one known point.
    """
    period = period if period <= len(history) else 1
    season = np.full(period, np.nan)
    for end in range(len(history), 0, -period):
        part = history[max(0, end - period) : end]
        tail = season[period - len(part) :]
        tail[np.isnan(tail)] = part[np.isnan(tail)]
        if not np.isnan(season).any():
            break
    known = history[np.isfinite(history)]
    season[np.isnan(season)] = known[-1]
    return np.tile(season, -(-horizon // period))[:horizon]


Points = NDArray[np.float64]
MIN_KNOWN = 2  # points of the past: a seasonal error needs a pair


@dataclass(frozen=True)
class EvaluationPlan:
    """How far to forecast, how often per series, and how much of the past a model may see."""

    horizon: int
    windows: int
    context: int

    def __post_init__(self) -> None:
        for name in ("horizon", "windows", "context"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} must be at least 1, not {getattr(self, name)}.")


@dataclass(frozen=True)
class EvaluationWindow:
    """One forecast to make, and what it is measured by. Missing points are NaN.

    Holds copies of what is needed, so that a long series is not kept for its end.
    """

    series: int
    group: str
    context: Points  # the last points before the window: what a model may see
    truth_H: Points
    naive_H: Points  # what seasonal naive forecasts from all points before the window
    scale: float  # the seasonal error of all points before the window


def rolling_windows(source: EvaluationData, plan: EvaluationPlan) -> Iterator[EvaluationWindow]:
    """Yield the windows of all series, in order; the last one of a series ends where it ends.

    A window is left out where fewer than 2 points are known before it, none among those that the
    model may see, or none inside it.
    """
    for index in range(len(source.series)):
        length = int(source.series.lengths[index])
        count = min(plan.windows, length // plan.horizon)
        if not count:
            continue
        points = source.series.read(index, 0, length).astype(np.float64)
        points[~np.isfinite(points)] = np.nan
        group, period = source.group(index), source.period(index)
        for start in range(length - count * plan.horizon, length, plan.horizon):
            history, truth_H = points[:start], points[start : start + plan.horizon]
            context = history[-plan.context :].copy()
            enough = np.isfinite(history).sum() >= MIN_KNOWN
            if enough and np.isfinite(context).any() and np.isfinite(truth_H).any():
                naive_H = seasonal_naive(history, period, plan.horizon)
                scale = seasonal_error(history, period)
                yield EvaluationWindow(index, group, context, truth_H.copy(), naive_H, scale)
