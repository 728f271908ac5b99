"""Tiles of kernels that pass once over the rows of a matrix."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """Rows and (at most) columns that a program works on at a time, and its warps."""

    rows: int
    columns: int
    warps: int


def column_block(width: int, most: int) -> int:
    """Return how many columns of `width` a tile takes: a power of two, `most` or fewer.

    It divides the width where a power of two of at least 128 does, so that no lane is idle.
    """
    dividing = min(width & -width, most)
    return dividing if dividing >= 128 else min(1 << max(width - 1, 0).bit_length(), most)
