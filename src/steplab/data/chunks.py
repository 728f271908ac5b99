"""A series read from end to end in pieces, so that its length does not matter."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from steplab.data.series import SeriesSet
from steplab.errors import SteplabError, UserError

CHUNK = 2**18  # points per read: 1 MiB


def chunks(series: SeriesSet, index: int, size: int = CHUNK) -> Iterator[NDArray[np.float32]]:
    """Yield the points of series `index` in order, at most `size` at a time."""
    length = int(series.lengths[index])
    for start in range(0, length, size):
        try:
            yield series.read(index, start, min(start + size, length))
        except SteplabError:
            raise
        except Exception as error:  # whatever a reader raises is told with its place
            raise UserError(
                f"{series.name}: series {index} cannot be read from point {start}: "
                f"{error or type(error).__name__}."
            ) from error
