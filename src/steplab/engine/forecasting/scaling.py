"""Every context by its own mean and deviation, and its forecast back in its own units.

(x - mean) / std with ddof 0 over the known points. A context without spread becomes 0, and its
forecast is that one value: there is no unit in which the model's answer could be read.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Series = NDArray[np.float64]


class Scaled(NamedTuple):
    """A context as the model sees it: every point known, about 0 in the mean, about 1 wide."""

    values: Series
    centre: float  # both in units of 2 ** exponent
    spread: float
    exponent: int

    def undo(self, forecast: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return a forecast of any shape in the series' own units."""
        with np.errstate(over="ignore"):  # Inf is found and told where forecasts are collected
            return np.ldexp(forecast * self.spread + self.centre, self.exponent)


def scale(context: Series) -> Scaled:
    """Scale a context with at least one known point; missing ones are filled in.

    Inside, on the line between their neighbours; at the ends, by the nearest known value. They
    have no weight in the mean and the deviation.
    """
    known = np.isfinite(context)
    whole = bool(known.all())
    # A power of two is an exact divisor; with it no sum of squares can overflow.
    exponent = int(np.frexp(np.abs(context[known]).max())[1])
    units = np.ldexp(np.where(known, context, 0.0), -exponent)
    observed = units if whole else units[known]
    low, high = float(observed.min()), float(observed.max())
    if low == high:  # exactly: the rounded mean would leave a tiny false deviation
        return Scaled(np.zeros(len(context)), low, 0.0, exponent)
    centre = float(observed.mean())
    spread = float(observed.std())
    values = (units - centre) / spread
    if not whole:
        places = np.arange(len(context))
        values = np.interp(places, places[known], values[known])
    return Scaled(values, centre, spread, exponent)
