"""Forecast errors as sums over points, and the metrics computed from them, as GluonTS does it.

Each window keeps sums instead of means, so that a group of windows is scored point by point,
whatever is missing in each. Pure numpy.
"""

# H points of the horizon, Q quantile levels
from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.float64]
NAMES = ("MASE", "sMAPE", "MAE", "MSE", "WQL")
FLOAT32_EPS = float(np.finfo(np.float32).eps)  # series are stored in float32


class Sums(NamedTuple):
    """Sums over the known points of one or more windows."""

    points: float
    absolute: float  # |y - point|
    squared: float  # (y - mean) ** 2
    symmetric: float  # 2 |y - point| / (|y| + |point|), 0 where both are 0
    quantile: float  # mean over levels of 2 |(y - q) ([q >= y] - level)|
    magnitude: float  # |y|
    scaled: float  # |y - point| / seasonal error
    scaled_points: float  # points of windows whose seasonal error is not 0


@dataclass(frozen=True)
class Metrics:
    """The metrics of a group of windows; NaN if there is nothing to divide by."""

    mase: float
    smape: float
    mae: float
    mse: float
    wql: float

    def by_name(self) -> dict[str, float]:
        """Return the metrics under the names that tables show."""
        return dict(zip(NAMES, (self.mase, self.smape, self.mae, self.mse, self.wql), strict=True))


class WindowForecast(NamedTuple):
    """The forecast of one window."""

    mean_H: Points
    quantiles_HQ: Points | None = None  # None: a point forecast
    levels: tuple[float, ...] = ()

    @property
    def point_H(self) -> Points:
        """The median if the model predicts it, otherwise the mean: a median minimizes |error|."""
        if self.quantiles_HQ is not None and 0.5 in self.levels:
            return self.quantiles_HQ[:, self.levels.index(0.5)]
        return self.mean_H


def seasonal_error(history: Points, period: int) -> float:
    """Return the mean |y_t - y_(t - period)| over the known pairs of `history` [points].

    A period that leaves no pair counts as 1. NaN without a known pair; 0 if the error is not
    larger than float32 rounding, as in a series that repeats itself.
    """
    period = period if period < len(history) else 1
    differences = np.abs(history[period:] - history[:-period])
    known = differences[np.isfinite(differences)]
    if not len(known):
        return math.nan
    error = float(known.mean())
    rounding = FLOAT32_EPS * float(np.abs(history[np.isfinite(history)]).max())
    return error if error > rounding else 0.0


def score(truth_H: Points, forecast: WindowForecast, scale: float) -> Sums:
    """Return the sums of one window over its known points; `scale` is its seasonal error."""
    known = np.isfinite(truth_H)
    y, point = truth_H[known], forecast.point_H[known]
    absolute = np.abs(y - point)
    size = np.abs(y) + np.abs(point)
    symmetric = 2 * absolute / np.where(size > 0, size, 1.0)
    has_scale = scale > 0
    return Sums(
        points=float(len(y)),
        absolute=float(absolute.sum()),
        squared=float(np.square(y - forecast.mean_H[known]).sum()),
        symmetric=float(symmetric.sum()),
        quantile=float(_quantile_losses(y, forecast, known).sum()),
        magnitude=float(np.abs(y).sum()),
        scaled=float(absolute.sum()) / scale if has_scale else 0.0,
        scaled_points=float(len(y)) if has_scale else 0.0,
    )


def _quantile_losses(y: Points, forecast: WindowForecast, known: NDArray[np.bool_]) -> Points:
    """Return the loss of each known point; a point forecast counts as all of 0.1 to 0.9."""
    if forecast.quantiles_HQ is None:
        return np.abs(y - forecast.mean_H[known])
    quantiles = forecast.quantiles_HQ[known]
    above = (quantiles >= y[:, None]) - np.array(forecast.levels)
    losses: Points = 2 * np.abs((y[:, None] - quantiles) * above)
    return losses.mean(-1)


def total(sums: Iterable[Sums]) -> Sums:
    """Add up windows exactly, so that their order does not matter."""
    columns = list(zip(*sums, strict=True))
    return Sums(*map(math.fsum, columns)) if columns else Sums(*[0.0] * len(Sums._fields))


def metrics(sums: Sums) -> Metrics:
    """Return the metrics of a group of windows."""
    return Metrics(
        mase=_quotient(sums.scaled, sums.scaled_points),
        smape=_quotient(sums.symmetric, sums.points),
        mae=_quotient(sums.absolute, sums.points),
        mse=_quotient(sums.squared, sums.points),
        wql=_quotient(sums.quantile, sums.magnitude),
    )


def _quotient(value: float, by: float) -> float:
    return value / by if by > 0 else math.nan
