"""What a set of series holds, counted in one pass over its points."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from steplab.data.series import CHUNK_POINTS, SeriesSet, chunks


@dataclass(frozen=True)
class SeriesStats:
    """Counts over all series. Lengths are in points."""

    series: int
    points: int
    shortest: int
    median: float
    longest: int
    missing: int  # points that are NaN or Inf
    repeated: int  # points equal to the one before
    time_steps: Mapping[str, int]  # series by their step in time, if times are known

    @property
    def missing_share(self) -> float:
        """Missing points over all points."""
        return self.missing / max(self.points, 1)

    @property
    def flat_share(self) -> float:
        """Repeated points over those with a point before them; at most 0.2 in a clean set."""
        return self.repeated / max(self.points - self.series, 1)


def series_stats(
    series: SeriesSet,
    advance: Callable[[int], None] = lambda points: None,
    chunk: int = CHUNK_POINTS,
) -> SeriesStats:
    """Read every point once; `advance` is called with the number of points after each read."""
    missing = repeated = 0
    for index in range(len(series)):
        last = np.empty(0, np.float32)
        for points in chunks(series, index, chunk):
            missing += int((~np.isfinite(points)).sum())
            joined = np.concatenate([last, points])
            repeated += int((joined[1:] == joined[:-1]).sum())
            last = points[-1:]
            advance(len(points))
    lengths = series.lengths
    return SeriesStats(
        series=len(series),
        points=int(lengths.sum()),
        shortest=int(lengths.min()),
        median=float(np.median(lengths)),
        longest=int(lengths.max()),
        missing=missing,
        repeated=repeated,
        time_steps=count_time_steps(series),
    )


def count_time_steps(series: SeriesSet) -> dict[str, int]:
    """Return how many series have which step in time; empty if the format has no times."""
    found = Counter(getattr(series, "time_steps", {}))
    for member in getattr(series, "members", ()):
        found.update(count_time_steps(member))
    return dict(found.most_common())


def bytes_on_disk(path: Path) -> int:
    """Return the size of a file, or of all files of a folder without its hidden subfolders."""
    if path.is_file():
        return path.stat().st_size
    total, seen = 0, set()
    for where, folders, files in os.walk(path, followlinks=True):
        if (real := os.path.realpath(where)) in seen:  # a link that leads back
            folders.clear()
            continue
        seen.add(real)
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = (Path(where, name) for name in files)
        total += sum(path.stat().st_size for path in paths if path.is_file())
    return total
