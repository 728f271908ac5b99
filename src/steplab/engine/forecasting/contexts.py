"""The past of series, in whatever form it is given, as a list of float64 arrays."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Number
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steplab.errors import UserError

Series = NDArray[np.float64]
FORMS = "Give a 1-D array, a list of 1-D arrays, or a 2-D array padded with NaN on the left."


def read_contexts(context: Any) -> list[Series]:
    """Return one array per series: a 1-D array is one, a 2-D one its rows, a list its members."""
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


def usable_part(series: Series, most: int, name: str) -> Series:
    """Return the last `most` points without missing ones in front; NaN and Inf are missing."""
    kept = series[-most:]
    known = np.isfinite(kept)
    if known.all() and len(kept):
        return kept
    if not known.any():
        among = f" among its last {most:,}" if len(series) > most else ""
        raise UserError(f"Series {name} has no known point{among}.", "Leave it out.")
    return kept[int(np.argmax(known)) :]


def _is_series(values: Sequence[Any]) -> bool:
    """Whether a list is one series: numbers, or None for missing points."""
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
