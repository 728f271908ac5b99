"""Prediction: what a Forecaster returns, and the quantile levels in it. No torch."""

# B series, H points of the horizon, Q quantile levels
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steplab.core.errors import UserError

LONGEST_HORIZON = 100_000  # points; every few of them are another step of the model


def check_horizon(horizon: int) -> None:
    """Refuse a horizon that is no number of points, or too long to be planned."""
    if horizon < 1:
        raise UserError(f"The horizon must be at least 1 point, not {horizon}.")
    if horizon > LONGEST_HORIZON:
        raise UserError(f"The horizon must be at most {LONGEST_HORIZON:,} points, not {horizon:,}.")


@dataclass(frozen=True)
class Prediction:
    """Forecasts in the units of their series, in the order in which the contexts were given."""

    mean_BH: NDArray[np.float64]  # the point forecast
    quantiles_BHQ: NDArray[np.float64] | None = None  # from low to high; None for a point model
    levels: tuple[float, ...] = ()  # of the quantiles, as in (0.1, 0.5, 0.9)

    @property
    def horizon(self) -> int:
        """Points that were forecast."""
        return self.mean_BH.shape[1]

    def __len__(self) -> int:
        return len(self.mean_BH)


def choose_levels(
    asked: Sequence[float] | None, trained: Sequence[float]
) -> tuple[tuple[float, ...], list[int]]:
    """Return (levels from low to high, their indices among the trained ones); None asks for all."""
    if asked is None:
        return tuple(trained), list(range(len(trained)))
    wanted = sorted(set(asked))
    if wanted and not trained:
        raise UserError(
            "This is a point model: it has no quantiles.",
            "Leave them out, or train with quantiles: steplab train --quantiles 0.1,0.5,0.9",
        )
    unknown = [level for level in wanted if level not in trained]
    if unknown:
        known = ", ".join(f"{level:g}" for level in trained)
        raise UserError(
            f"The model has no quantile {', '.join(f'{level:g}' for level in unknown)}.",
            f"It was trained for {known}.",
        )
    return tuple(wanted), [list(trained).index(level) for level in wanted]
