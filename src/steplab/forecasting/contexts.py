"""The past of series: read in whatever form it is given, cut, scaled and unscaled. No torch.

Every context is scaled by its own mean and standard deviation, (x - mean) / std with ddof 0 over
its known points. A context without spread becomes 0, and its forecast is that one value: there is
no unit in which the model's answer could be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from steplab.core.errors import UserError

Series = NDArray[np.float64]
FORMS = "Give a 1-D array, a list of 1-D arrays, or a 2-D array padded with NaN on the left."


def read_contexts(context: Any) -> list[Series]:
    """Return one array per series: a 1-D array is one series, a 2-D array or a list several."""
    if isinstance(context, (list, tuple)) and not _is_series(context):
        if not context:
            raise UserError("There is no series to forecast.", FORMS)
        found = [_array(member, f"series {index}") for index, member in enumerate(context)]
        for index, array in enumerate(found):
            if array.ndim != 1:
                raise UserError(f"Series {index} has {array.ndim} dimensions, not 1.", FORMS)
        return found
    array = _array(context, "the context")
    if array.ndim not in (1, 2):
        raise UserError(f"The context has {array.ndim} dimensions.", FORMS)
    if array.ndim == 2 and not len(array):
        raise UserError("There is no series to forecast.", FORMS)
    return list(np.atleast_2d(array))


def usable_part(series: Series, max_points: int, name: str) -> Series:
    """Return the last `max_points` points from the first known one on; NaN and Inf are missing."""
    kept = series[-max_points:]
    known = np.isfinite(kept)
    if known.all() and len(kept):
        return kept
    if not known.any():
        among = f" among its last {max_points:,}" if len(series) > max_points else ""
        raise UserError(f"Series {name} has no known point{among}.", "Leave it out.")
    return kept[int(np.argmax(known)) :]


class ScaledContext(NamedTuple):
    """A context as the model sees it: no missing points, mean about 0, std about 1."""

    values: Series
    center: float  # mean, in units of 2 ** exponent
    spread: float  # standard deviation, in units of 2 ** exponent
    exponent: int

    def undo(self, forecast: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return a forecast of any shape in the series' own units."""
        with np.errstate(over="ignore"):  # Inf is refused where forecasts are collected
            return np.ldexp(forecast * self.spread + self.center, self.exponent)


def scale_context(context: Series) -> ScaledContext:
    """Scale a context with at least one known point; missing points are filled in.

    Inside, on the line between their neighbors; at the ends, by the nearest known value. They do
    not count in the mean and the standard deviation.
    """
    known = np.isfinite(context)
    whole = bool(known.all())
    # Dividing by a power of two is exact, and keeps sums of squares from overflowing.
    exponent = int(np.frexp(np.abs(context[known]).max())[1])
    units = np.ldexp(np.where(known, context, 0.0), -exponent)
    observed = units if whole else units[known]
    low, high = float(observed.min()), float(observed.max())
    if low == high:  # exactly equal: the rounded mean would leave a tiny, wrong deviation
        return ScaledContext(np.zeros(len(context)), low, 0.0, exponent)
    center = float(observed.mean())
    spread = float(observed.std())
    values = (units - center) / spread
    if not whole:
        places = np.arange(len(context))
        values = np.interp(places, places[known], values[known])
    return ScaledContext(values, center, spread, exponent)


def _is_series(values: Sequence[Any]) -> bool:
    """Return whether a list is one series: numbers, or None for missing points."""
    return bool(values) and all(v is None or isinstance(v, Number) for v in values)


def _array(values: Any, name: str) -> Series:
    if hasattr(values, "detach"):  # a tensor: any device, any dtype, bfloat16 included
        values = values.detach().cpu().double().numpy()
    try:
        array = np.asarray(values)
        if array.dtype.kind == "O":  # numbers with None among them
            array = array.astype(np.float64)
    except (TypeError, ValueError):
        raise UserError(f"{name.capitalize()} does not hold numbers only.", FORMS) from None
    if array.dtype.kind not in "fiu":
        raise UserError(f"{name.capitalize()} holds {array.dtype}, not real numbers.", FORMS)
    return array.astype(np.float64)
