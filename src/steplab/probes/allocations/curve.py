"""Bytes by kind over time, thinned for drawing."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from steplab.probes.allocations.blocks import Block
from steplab.record.memory_timeline import KINDS

MOST_POINTS = 2000

Ints = NDArray[np.int64]


def bytes_by_position(blocks: Iterable[Block], changes: int) -> Ints:
    """Return bytes held at every position, shape (changes + 1, kinds)."""
    steps = np.zeros((changes + 1, len(KINDS)), dtype=np.int64)
    column = {kind: number for number, kind in enumerate(KINDS)}
    for block in blocks:
        steps[block.made + 1, column[block.kind]] += block.bytes
        if block.freed is not None:
            steps[block.freed + 1, column[block.kind]] -= block.bytes
    return np.cumsum(steps, axis=0)


def thinned(totals: Ints) -> Ints:
    """Return at most MOST_POINTS positions: the first, the last, and each stretch's extremes.

    The highest of all is among them: it is the highest of its stretch.
    """
    if len(totals) <= MOST_POINTS:
        return np.arange(len(totals))
    kept = {0, len(totals) - 1}
    borders = np.linspace(0, len(totals), (MOST_POINTS - 2) // 2 + 1).astype(int)
    for begin, end in pairwise(borders.tolist()):
        stretch = totals[begin:end]
        kept |= {begin + int(stretch.argmax()), begin + int(stretch.argmin())}
    return np.array(sorted(kept))
