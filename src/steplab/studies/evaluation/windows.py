"""Rolling windows at the end of each series: they touch, and never overlap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steplab.errors import UserError
from steplab.studies.evaluation.metrics import seasonal_error
from steplab.studies.evaluation.seasonal_naive import seasonal_naive
from steplab.studies.evaluation.sources import Source

Points = NDArray[np.float64]
LEAST_KNOWN = 2  # points of the past: a seasonal error needs a pair


@dataclass(frozen=True)
class Plan:
    """How far to forecast, how often per series, and how much of the past a model may see."""

    horizon: int
    windows: int
    context: int

    def __post_init__(self) -> None:
        for name in ("horizon", "windows", "context"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} must be at least 1, not {getattr(self, name)}.")


@dataclass(frozen=True)
class Window:
    """One forecast to make, and what it is measured by. Missing points are NaN.

    Holds copies of what is needed, so that a long series is not kept for its end.
    """

    series: int
    group: str
    context: Points  # the last points before the window: what a model may see
    truth_H: Points
    naive_H: Points  # what seasonal naive forecasts from all points before the window
    scale: float  # the seasonal error of all points before the window


def rolling_windows(source: Source, plan: Plan) -> Iterator[Window]:
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
            enough = np.isfinite(history).sum() >= LEAST_KNOWN
            if enough and np.isfinite(context).any() and np.isfinite(truth_H).any():
                naive_H = seasonal_naive(history, period, plan.horizon)
                scale = seasonal_error(history, period)
                yield Window(index, group, context, truth_H.copy(), naive_H, scale)
