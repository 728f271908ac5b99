"""Rolling windows at the end of each series, and the seasonal naive forecast of each.

The windows of a series follow each other without gap or overlap.
"""

# H points of the horizon
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from steplab.core.errors import UserError
from steplab.forecasting.evaluation.data import EvaluationData
from steplab.forecasting.evaluation.metrics import Points, seasonal_error
from steplab.forecasting.prediction import check_horizon

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
        check_horizon(self.horizon)


@dataclass(frozen=True)
class EvaluationWindow:
    """One forecast to make, and what it is judged by. Missing points are NaN.

    Holds copies, so that a long series is not kept in memory for its end.
    """

    series: int
    group: str
    context: Points  # the last points before the window: what a model may see
    truth_H: Points
    naive_H: Points  # what seasonal naive forecasts from all points before the window
    scale: float  # the seasonal error of all points before the window


def rolling_windows(data: EvaluationData, plan: EvaluationPlan) -> Iterator[EvaluationWindow]:
    """Yield the windows of all series in order; the last window of a series ends with the series.

    A window is left out if fewer than 2 points are known before it, none of them among those that
    the model may see, or none inside it.
    """
    for index in range(len(data.series)):
        length = int(data.series.lengths[index])
        count = min(plan.windows, length // plan.horizon)
        if not count:
            continue
        points = data.series.read(index, 0, length).astype(np.float64)
        points[~np.isfinite(points)] = np.nan
        group, period = data.group(index), data.period(index)
        for start in range(length - count * plan.horizon, length, plan.horizon):
            history, truth_H = points[:start], points[start : start + plan.horizon]
            context = history[-plan.context :].copy()
            enough = np.isfinite(history).sum() >= MIN_KNOWN
            if enough and np.isfinite(context).any() and np.isfinite(truth_H).any():
                naive_H = seasonal_naive(history, period, plan.horizon)
                scale = seasonal_error(history, period)
                yield EvaluationWindow(index, group, context, truth_H.copy(), naive_H, scale)


def seasonal_naive(history: Points, period: int, horizon: int) -> Points:
    """Forecast `horizon` points by repeating the last period of `history` [points].

    A missing point is taken from the last period in which it is known, otherwise the last known
    point is used. A period longer than the history counts as 1. Needs one known point.
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
