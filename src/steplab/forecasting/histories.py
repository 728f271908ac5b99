"""Histories: the series to forecast, with ids and times, from a file or a frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from steplab.core.errors import UserError
from steplab.data.formats import open_series
from steplab.data.formats.arrays import open_npz
from steplab.data.formats.frames import (
    READERS,
    SCHEMES,
    Columns,
    SeriesFrame,
    from_pandas,
    read_frame,
)
from steplab.data.time_step import TimeStep
from steplab.forecasting.time_grid import Grid, Times, choose_grids, future_times, on_grid

if TYPE_CHECKING:
    import pandas as pd

ColumnNames = tuple[str | None, str | None, str | None]  # columns of ids, times and values


@dataclass(frozen=True)
class Histories:
    """Series to forecast, and what their forecasts are written with."""

    name: str
    columns: Columns
    ids: tuple[Any, ...]
    times: tuple[Times, ...]  # of each series; at least its last one
    grids: tuple[Grid, ...]
    values: tuple[NDArray[np.float64], ...]  # on the grid, NaN where a row is missing
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def future(self, index: int, horizon: int) -> Times:
        """Return the times of the forecast of one series."""
        return future_times(self.times[index], self.grids[index], horizon)


def read_histories(path: Path, names: ColumnNames, freq: str | None, max_points: int) -> Histories:
    """Read the last `max_points` points of the series in a file or folder.

    In files without times, series are called 0, 1, 2, ... (in a .npz file by the names of its
    arrays), and their times count the points.
    """
    if path.suffix.lower() in READERS and path.is_file():
        return _on_grids(_read_with(lambda c: read_frame(path, c), names), freq, max_points)
    if any(names) or freq is not None:
        raise UserError(
            f"{path} has no columns and no times.", "Columns and --freq are for .csv and .parquet."
        )
    series = open_series(path)
    lengths = series.lengths.tolist()
    values = [series.read(i, max(0, n - max_points), n) for i, n in enumerate(lengths)]
    return Histories(
        series.name,
        SCHEMES[0],
        _ids(path, len(series)),
        tuple(np.array([length - 1]) for length in lengths),
        (TimeStep(1, "step"),) * len(series),
        tuple(one.astype(np.float64) for one in values),
    )


def histories_from_frame(
    frame: pd.DataFrame, names: ColumnNames, freq: str | None, max_points: int
) -> Histories:
    """Take the last `max_points` points of the series in a long frame."""
    return _on_grids(_read_with(lambda c: from_pandas(frame, "frame", c), names), freq, max_points)


def _ids(path: Path, count: int) -> tuple[Any, ...]:
    if path.suffix.lower() == ".npz":
        with open_npz(path) as archive:  # reads the names only
            if len(archive.files) == count:
                return tuple(archive.files)
    return tuple(range(count))


def _read_with(read: Any, names: ColumnNames) -> SeriesFrame:
    """Read with the column names given; take the others from the first scheme that fits."""
    if not any(names):
        found: SeriesFrame = read(None)
        return found
    failures: list[UserError] = []
    for scheme in SCHEMES:
        chosen = Columns(*(asked or known for asked, known in zip(names, scheme, strict=True)))
        try:
            found = read(chosen)
            return found
        except UserError as error:
            failures.append(error)
    raise failures[0]


def _on_grids(frame: SeriesFrame, freq: str | None, max_points: int) -> Histories:
    grids = choose_grids(frame.timestamps, frame.ids, freq)
    rows = zip(frame.timestamps, frame.values, grids, frame.ids, strict=True)
    values = tuple(on_grid(times, own, grid, max_points, name) for times, own, grid, name in rows)
    notes = [note for note in frame.notes if note != frame.gap_note]  # here they are missing points
    notes += _missing_note(values, frame)
    return Histories(
        frame.name, frame.columns, frame.ids, frame.timestamps, tuple(grids), values, tuple(notes)
    )


def _missing_note(values: Sequence[NDArray[np.float64]], frame: SeriesFrame) -> list[str]:
    """Return a note on how many points of the contexts are missing."""
    gaps = [int((~np.isfinite(one)).sum()) for one in values]
    broken = [name for name, count in zip(frame.ids, gaps, strict=True) if count]
    if not broken:
        return []
    are = "points are" if sum(gaps) > 1 else "point is"
    return [
        f"{frame.name}: {sum(gaps):,} {are} missing in the contexts of {len(broken):,} of "
        f"{len(frame):,} series (first: {broken[0]!r}); they are filled in between their neighbors"
    ]
