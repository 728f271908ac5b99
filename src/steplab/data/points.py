"""What every format does with the points of one window: check the range, make them float32."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def check_range(lengths: NDArray[np.int64], index: int, start: int, stop: int) -> None:
    """Raise an IndexError unless [start, stop) lies inside series `index`.

    A wrong range is a fault of the calling code. A slice would hide it by returning fewer points.
    """
    if not 0 <= index < len(lengths):
        raise IndexError(f"series {index} of {len(lengths)}")
    if not 0 <= start <= stop <= lengths[index]:
        raise IndexError(f"points {start} to {stop} of series {index} with {lengths[index]} points")


def to_float32(points: NDArray[Any]) -> NDArray[np.float32]:
    """Copy points as float32. A value above 3.4e38 becomes Inf, which windows mask."""
    if points.dtype.itemsize <= 4:
        return points.astype(np.float32)
    with np.errstate(over="ignore"):
        return points.astype(np.float32)
