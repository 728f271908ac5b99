"""Which series these are: told by their lengths and a few of their points."""

from __future__ import annotations

import zlib

import numpy as np

from steplab.data.series import Source

SERIES, POINTS = 16, 64  # sampled: 16 reads, however large the set is


def fingerprint(series: Source) -> str:
    """Return a short text that differs when the number, lengths or sampled points differ."""
    check = zlib.crc32(np.ascontiguousarray(series.lengths).tobytes())
    for index in np.linspace(0, len(series) - 1, min(SERIES, len(series))).astype(int).tolist():
        length = int(series.lengths[index])
        start = max(0, (length - POINTS) // 2)
        check = zlib.crc32(series.read(index, start, min(length, start + POINTS)).tobytes(), check)
    return f"{len(series)} series, {check:08x}"
