"""Series of different lengths into batches of about the same length. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray


def batches(
    lengths: Sequence[int], most_series: int, most_points: int
) -> Iterator[NDArray[np.int64]]:
    """Yield the numbers of the series of each batch, shortest first.

    A batch has at most `most_series` series, and at most `most_points` points with its padding
    unless one series alone has more. So a batch is as long as its last series, and the padding
    is only the difference between neighbours in order of length.
    """
    order = np.argsort(np.asarray(lengths), kind="stable")
    start = 0
    while start < len(order):
        stop = start + 1
        while (
            stop < len(order)
            and stop - start < most_series
            and (stop - start + 1) * lengths[order[stop]] <= most_points
        ):
            stop += 1
        yield order[start:stop]
        start = stop
