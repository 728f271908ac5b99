"""What a set of series holds, counted in one pass over its points."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from steplab.data.chunks import CHUNK, chunks
from steplab.data.series import SeriesSet


@dataclass(frozen=True)
class Census:
    """Counts over all series. Lengths are in points."""

    series: int
    points: int
    shortest: int
    median: float
    longest: int
    missing: int  # points that are NaN or Inf
    still: int  # points equal to the one before
    steps: Mapping[str, int]  # series by their step in time, where times are known

    @property
    def missing_share(self) -> float:
        """Of all points."""
        return self.missing / max(self.points, 1)

    @property
    def flat_share(self) -> float:
        """Of the points that have one before them; in a clean set at most a fifth."""
        return self.still / max(self.points - self.series, 1)


def take_census(
    series: SeriesSet, advance: Callable[[int], None] = lambda points: None, chunk: int = CHUNK
) -> Census:
    """Read every point once; `advance` is told how many were read."""
    missing = still = 0
    for index in range(len(series)):
        last = np.empty(0, np.float32)
        for points in chunks(series, index, chunk):
            missing += int((~np.isfinite(points)).sum())
            joined = np.concatenate([last, points])
            still += int((joined[1:] == joined[:-1]).sum())
            last = points[-1:]
            advance(len(points))
    lengths = series.lengths
    return Census(
        series=len(series),
        points=int(lengths.sum()),
        shortest=int(lengths.min()),
        median=float(np.median(lengths)),
        longest=int(lengths.max()),
        missing=missing,
        still=still,
        steps=steps(series),
    )


def steps(series: SeriesSet) -> dict[str, int]:
    """Return how many series have which step in time; empty where the format has no times."""
    found = Counter(getattr(series, "steps", {}))
    for member in getattr(series, "members", ()):
        found.update(steps(member))
    return dict(found.most_common())


def bytes_on_disk(path: Path) -> int:
    """Return the size of a file, or of all files in a folder that is not hidden."""
    if path.is_file():
        return path.stat().st_size
    total = 0
    for where, folders, files in os.walk(path, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        total += sum(Path(where, name).stat().st_size for name in files)
    return total
