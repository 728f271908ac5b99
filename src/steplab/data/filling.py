"""How full windows are, by the lengths of the series alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steplab.data.packed_windows import piece_lengths
from steplab.data.packing import pack
from steplab.data.windows import LEAST_POINTS, full_windows


@dataclass(frozen=True)
class Filling:
    """What becomes of the points of a set of series."""

    windows: int
    padding: float  # share of the windows' points that belong to no series
    unused: float  # share of the series' points that are in no window

    def __str__(self) -> str:
        return f"windows={self.windows:,} padding={self.padding:.1%} unused={self.unused:.1%}"


def filling(
    lengths: NDArray[np.int64], length: int, stride: int, patch_length: int, packed: bool
) -> Filling:
    """Return how full the windows are: those of `PackedWindows`, or of `Windows`.

    `length` is in points; points between windows with a larger stride are unused.
    """
    full = full_windows(lengths, length, stride)
    seen = np.where(full > 0, (full - 1) * min(stride, length) + length, 0)
    if packed:
        pieces = piece_lengths(lengths, length, stride)
        overlap = np.where(full > 0, max(0, length - stride), 0)
        groups = pack(np.bincount(pieces), length, patch_length)
        more = sum(group.windows for group in groups)
    else:
        pieces = np.where((full > 0) | (lengths < LEAST_POINTS), 0, lengths)
        overlap = np.zeros_like(pieces)
        more = int((pieces > 0).sum())
    seen = seen + np.where(pieces > 0, pieces - overlap, 0)
    windows = int(full.sum()) + more
    inside = int(full.sum()) * length + int(pieces.sum())
    room, total = windows * length, int(lengths.sum())
    return Filling(
        windows, 1 - inside / room if room else 0.0, 1 - int(seen.sum()) / total if total else 0.0
    )
