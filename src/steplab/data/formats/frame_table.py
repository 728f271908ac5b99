"""From table rows in any order to series that are sorted and checked. Needs pandas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from steplab.core.errors import UserError
from steplab.core.input_file import check_memory
from steplab.data.formats.frames import MAX_NAMED, Columns, SeriesFrame, choose_columns
from steplab.data.time_step import TimeStep, count_gaps, format_time, infer_time_step

SERIES_BYTES = 500  # that one series takes beside its points
UNEVEN = "uneven"  # in place of a step, for series that have none
WRITE_TIMES = "Write times as 2024-01-31 or 2024-01-31 13:00:00, or count steps in whole numbers."


def from_table(
    table: pd.DataFrame, name: str, asked: Columns | None, found: Sequence[str]
) -> SeriesFrame:
    """Check and sort the rows of `table`; `found` are all column names, for messages."""
    columns = choose_columns(found, name, asked)
    if not len(table):
        raise UserError(f"{name} has no rows.")
    codes, ids = _ids(table[columns.id], name)
    check_memory(len(ids) * SERIES_BYTES, name)
    notes = _ignored_columns(found, columns, name)
    times = _times(table[columns.time], name, notes)
    values = _values(table[columns.value], name)
    order = np.lexsort((times, codes))
    times, codes = times[order], codes[order]
    _refuse_duplicates(times, codes, ids, name)
    cuts = np.flatnonzero(np.diff(codes)) + 1
    series = tuple(np.split(times, cuts))
    steps = [infer_time_step(each) for each in series]
    counts = Counter(UNEVEN if step is None else str(step) for step in steps)
    gap_note = _gap_note(series, steps, ids, name)
    notes += filter(None, [gap_note, _uneven_note(series, steps, name)])
    points = tuple(np.split(values[order], cuts))
    return SeriesFrame(name, columns, ids, series, points, dict(counts), tuple(notes), gap_note)


def _ids(column: pd.Series[Any], name: str) -> tuple[NDArray[np.int64], tuple[Any, ...]]:
    """Return (the number of each row's series, the ids by number)."""
    codes, ids = pd.factorize(column)
    if (codes < 0).any():
        raise UserError(f"{name}, row {_row(codes < 0)}: {column.name} is missing.")
    return codes.astype(np.int64), tuple(ids.tolist())


def _times(column: pd.Series[Any], name: str, notes: list[str]) -> NDArray[Any]:
    kind = column.dtype
    if pd.api.types.is_integer_dtype(kind) and not column.isna().any():
        return column.to_numpy(np.int64)
    if pd.api.types.is_numeric_dtype(kind):  # bool and float: neither a date nor a count
        bad = column.isna() if column.isna().any() else np.ones(len(column), bool)
        raise _not_a_time(column, name, np.asarray(bad))
    parsed = column if pd.api.types.is_datetime64_any_dtype(kind) else _parse_times(column)
    if parsed.isna().any():
        raise _not_a_time(column, name, parsed.isna().to_numpy())
    if parsed.dt.tz is not None:
        parsed = parsed.dt.tz_convert("UTC").dt.tz_localize(None)
        notes.append(f"{name}: times with a zone are read as UTC")
    return parsed.to_numpy()


def _parse_times(column: pd.Series[Any]) -> pd.Series[Any]:
    """Parse ISO 8601 only: 01/02/2024 is January here and February there."""
    try:
        return pd.to_datetime(column, format="ISO8601", errors="coerce")
    except ValueError:  # offsets that differ, as around a change to daylight saving time
        return pd.to_datetime(column, format="ISO8601", errors="coerce", utc=True)


def _not_a_time(column: pd.Series[Any], name: str, bad: NDArray[np.bool_]) -> UserError:
    value = column.iloc[int(np.argmax(bad))]
    said = "missing" if pd.isna(value) or value == "" else repr(str(value)[:30])
    return UserError(f"{name}, row {_row(bad)}: {column.name} is {said}, not a time.", WRITE_TIMES)


def _values(column: pd.Series[Any], name: str) -> NDArray[np.float64]:
    if pd.api.types.is_bool_dtype(column.dtype):
        raise UserError(f"{name}: {column.name} holds true and false, not numbers.")
    if pd.api.types.is_numeric_dtype(column.dtype):
        return column.to_numpy(np.float64, na_value=np.nan)
    numbers = pd.to_numeric(column, errors="coerce")
    bad = (numbers.isna() & column.notna()).to_numpy()
    if bad.any():
        value = str(column.iloc[int(np.argmax(bad))])[:30]
        raise UserError(f"{name}, row {_row(bad)}: {column.name} is {value!r}, not a number.")
    return numbers.to_numpy(np.float64, na_value=np.nan)


def _refuse_duplicates(
    times: NDArray[Any], codes: NDArray[np.int64], ids: tuple[Any, ...], name: str
) -> None:
    duplicate = (times[1:] == times[:-1]) & (codes[1:] == codes[:-1])
    if duplicate.any():
        row = int(np.argmax(duplicate))
        count = int(duplicate.sum())
        raise UserError(
            f"{name}: series {ids[codes[row]]!r} has two points at {format_time(times[row])}"
            + (f" ({count:,} such rows in all)." if count > 1 else "."),
            "Keep one, or give the series different ids.",
        )


def _ignored_columns(found: Sequence[str], columns: Columns, name: str) -> list[str]:
    extra = [column for column in found if column not in columns]
    if not extra:
        return []
    more = f" and {len(extra) - MAX_NAMED:,} more" if len(extra) > MAX_NAMED else ""
    return [f"{name}: ignored columns: {', '.join(extra[:MAX_NAMED])}{more}"]


def _gap_note(
    series: Sequence[NDArray[Any]],
    steps: Sequence[TimeStep | None],
    ids: tuple[Any, ...],
    name: str,
) -> str:
    """Say how many rows are missing: in training the points around a gap become neighbors."""
    missing, broken, example = 0, 0, ""
    for times, step, which in zip(series, steps, ids, strict=True):
        count, first = (0, None) if step is None else count_gaps(times, step)
        if count:
            missing, broken = missing + count, broken + 1
            example = example or f"{which!r} after {format_time(first)}"
    if not missing:
        return ""
    return (
        f"{name}: {missing:,} rows are missing in {broken:,} of {len(ids):,} series (first: "
        f"{example}); the points around a gap are read as neighbors"
    )


def _uneven_note(
    series: Sequence[NDArray[Any]], steps: Sequence[TimeStep | None], name: str
) -> str:
    pairs = zip(series, steps, strict=True)
    uneven = sum(step is None and len(times) > 1 for times, step in pairs)
    return (
        f"{name}: {uneven:,} of {len(steps):,} series have no even step in time" if uneven else ""
    )


def _row(bad: NDArray[np.bool_]) -> int:
    """Return the number of the first bad row, counted from 1 below the heading."""
    return int(np.argmax(bad)) + 1
