"""Prediction: what a Forecaster returns. No torch."""

# B series, H points of the horizon, Q quantile levels
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Prediction:
    """Forecasts in the units of their series, in the order in which the contexts were given."""

    mean_BH: NDArray[np.float64]  # the point forecast
    quantiles_BHQ: NDArray[np.float64] | None = None  # from low to high; None: a point model
    levels: tuple[float, ...] = ()  # of the quantiles, as in (0.1, 0.5, 0.9)

    @property
    def horizon(self) -> int:
        """Points that were forecast."""
        return self.mean_BH.shape[1]

    def __len__(self) -> int:
        return len(self.mean_BH)
