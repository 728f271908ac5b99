"""The forecast to beat: what was one period ago."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.float64]


def seasonal_naive(history: Points, period: int, horizon: int) -> Points:
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
