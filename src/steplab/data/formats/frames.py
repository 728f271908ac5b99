"""Long frames: .csv and .parquet tables with one row per series and time.

Two ways of naming the columns are known: `unique_id, ds, y` and `item_id, timestamp, target`.
A frame is read whole into memory: its rows may stand in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from steplab.core.errors import SteplabError, Unsupported, UserError
from steplab.core.input_file import check_memory, is_folder, shorten
from steplab.core.output_file import output_draft
from steplab.data.series import InMemorySeries, to_float32

if TYPE_CHECKING:
    import pandas as pd

INSTALL = "pip install 'steplab[frames]'"
MAX_NAMED = 12  # columns that a message lists
MOST_COLUMNS = 10_000  # of a .csv; pandas compares the names of 70,000 for minutes
CSV_GROWTH = 8  # bytes in memory for one of the file: 6 for hourly times, 7.9 for short rows
ROW_BYTES = 100  # in memory for one row: id, time, value, and their order
MISSING = ["", "NA", "N/A", "NaN", "nan", "null", "NULL", "None"]  # in the value column of a .csv


class Columns(NamedTuple):
    """What a frame calls its three columns."""

    id: str
    time: str
    value: str


SCHEMES = (Columns("unique_id", "ds", "y"), Columns("item_id", "timestamp", "target"))
KNOWN = f"Name them {' or '.join(', '.join(scheme) for scheme in SCHEMES)}: a row per point."


@dataclass(frozen=True)
class SeriesFrame:
    """The series of a frame, in the order in which their ids first appear.

    `timestamps[i]` is sorted and without duplicates: datetime64 without a zone, or int64 where the
    frame counts its steps; `values[i]` has the same shape [points]. NaN is a missing point. Missing
    rows are not filled in; `notes` mentions them.
    """

    name: str
    columns: Columns
    ids: tuple[Any, ...]  # as the frame holds them; text in a .csv
    timestamps: tuple[NDArray[Any], ...]
    values: tuple[NDArray[np.float64], ...]
    time_steps: Mapping[str, int]  # how many series have which step: {"1 hour": 12, "uneven": 1}
    notes: tuple[str, ...] = ()  # what a user should know: ignored columns, missing rows
    gap_note: str = ""  # the one among them about missing rows

    def __len__(self) -> int:
        return len(self.ids)


def read_frame(path: Path | str, columns: Columns | None = None) -> SeriesFrame:
    """Read a .csv or .parquet file; `columns` names its columns if no known scheme does."""
    path = Path(path)
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"{path} is neither .csv nor .parquet, so it is not a frame.")
    require_pandas(f"To read {path}")
    from steplab.data.formats.frame_table import from_table  # imports pandas

    if is_folder(path):
        raise UserError(f"{shorten(path)} is a folder, not a {path.suffix} file.")
    try:
        table, found = reader(path, columns)
        return from_table(table, str(path), columns, found)
    except SteplabError:
        raise
    except Exception as error:  # parsers and Arrow fail in many ways on a damaged file
        if isinstance(error, OSError) and error.strerror:  # Arrow's own have none
            raise UserError(f"{path} cannot be read: {error.strerror}.") from error
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UserError(f"{path} is not a valid {path.suffix} file: {reason}.") from error


def from_pandas(
    table: pd.DataFrame, name: str = "frame", columns: Columns | None = None
) -> SeriesFrame:
    """Read a long frame that is in memory; ids keep their type."""
    from steplab.data.formats.frame_table import from_table

    return from_table(table, name, columns, [str(column) for column in table.columns])


def to_pandas(frame: SeriesFrame) -> pd.DataFrame:
    """Return a long frame, series after series."""
    require_pandas("To make a frame")
    import pandas as pd

    ids = [name for name, times in zip(frame.ids, frame.timestamps, strict=True) for _ in times]
    times, values = np.concatenate(frame.timestamps), np.concatenate(frame.values)
    return pd.DataFrame(dict(zip(frame.columns, (ids, times, values), strict=True)))


def write_frame(frame: SeriesFrame | pd.DataFrame, path: Path | str, flag: str = "") -> None:
    """Write a .csv or .parquet file, complete or not at all; an old one is replaced.

    `flag` named the path, if any did.
    """
    path = Path(path)
    check_suffix(path)
    require_pandas(f"To write {path}")
    table = to_pandas(frame) if isinstance(frame, SeriesFrame) else frame
    with output_draft(path, flag) as draft:
        if path.suffix.lower() == ".csv":
            table.to_csv(draft, index=False)
        else:
            table.to_parquet(draft, index=False, engine="pyarrow")


def check_suffix(path: Path) -> None:
    """Refuse a file that `write_frame` cannot write, before any work is done for it."""
    if path.suffix.lower() not in READERS:
        raise UserError(f"A frame cannot be written to {path}.", "Name it .csv or .parquet.")


class FrameSeries(InMemorySeries):
    """The points of a frame as a set of series, with what is known about its times."""

    def __init__(self, frame: SeriesFrame) -> None:
        super().__init__(frame.name, [to_float32(values) for values in frame.values])
        self.notes, self.time_steps = frame.notes, frame.time_steps


def open_frame(path: Path) -> FrameSeries:
    """Read a frame as a set of series: float32, without its times."""
    return FrameSeries(read_frame(path))


def choose_columns(found: Sequence[str], name: str, asked: Columns | None = None) -> Columns:
    """Return the columns to read, or raise a UserError that says which ones were found."""
    for scheme in SCHEMES if asked is None else (asked,):
        if set(scheme) <= set(found):
            return scheme
    listed = ", ".join(map(repr, found[:MAX_NAMED])) or "none"
    more = f" and {len(found) - MAX_NAMED:,} more" if len(found) > MAX_NAMED else ""
    if asked is not None:
        missing = ", ".join(repr(column) for column in asked if column not in found)
        raise UserError(f"{name} has no column {missing}.", f"Its columns: {listed}{more}.")
    raise UserError(f"{name} has the columns {listed}{more}, not those of a long frame.", KNOWN)


def require_pandas(purpose: str) -> None:
    """Raise Unsupported unless pandas and pyarrow are installed."""
    from importlib.util import find_spec

    missing = [name for name in ("pandas", "pyarrow") if find_spec(name) is None]
    if missing:
        raise Unsupported(f"{purpose}, {' and '.join(missing)} must be installed.", INSTALL)


def _read_csv(path: Path, asked: Columns | None) -> tuple[pd.DataFrame, list[str]]:
    """Return (the three columns, the names of all); only the value column can be missing."""
    import pandas as pd

    check_memory(path.stat().st_size * CSV_GROWTH, path)
    wide = len(pd.read_csv(path, nrows=1, header=None, encoding="utf-8-sig").columns)
    if wide > MOST_COLUMNS:
        raise UserError(f"{path} has {wide:,} columns; a frame has {MOST_COLUMNS:,} at most.")
    head = pd.read_csv(path, nrows=1, encoding="utf-8-sig")
    if not isinstance(head.index, pd.RangeIndex):  # pandas would shift all columns by one
        raise ValueError("its rows have more fields than its heading")
    found = [str(name) for name in head.columns]
    chosen = choose_columns(found, str(path), asked)
    # All columns, though three are used: pandas counts the fields of a row only then, and in a file
    # with decimal commas the second half of every number would be dropped without a word.
    table = pd.read_csv(
        path,
        encoding="utf-8-sig",
        dtype={chosen.id: str},  # 007 stays 007, and a series may be called NA
        keep_default_na=False,
        na_values={chosen.value: MISSING},
        low_memory=False,  # otherwise a column's type is guessed again every megabyte
    )
    return table[list(chosen)], found


def _read_parquet(path: Path, asked: Columns | None) -> tuple[pd.DataFrame, list[str]]:
    import pyarrow as pa
    from pyarrow import parquet

    found = list(parquet.read_schema(path).names)
    chosen = choose_columns(found, str(path), asked)
    check_memory(parquet.read_metadata(path).num_rows * ROW_BYTES, path)
    # A text that repeats is stored once, and a few bytes can stand for terabytes of it: its length
    # is known before it is repeated.
    table = parquet.read_table(path, columns=list(chosen), read_dictionary=list(chosen))
    for index, column in enumerate(table.columns):
        if pa.types.is_dictionary(column.type):
            check_memory(sum(map(_text_bytes, column.chunks)), path)
            plain = pa.chunked_array(
                [chunk.dictionary_decode() for chunk in column.chunks], column.type.value_type
            )
            table = table.set_column(index, table.field(index).name, plain)
    # An index that pandas stored is an ordinary column here.
    return table.to_pandas(ignore_metadata=True), found


def _text_bytes(chunk: Any) -> int:
    """Return the bytes of a column of texts once every row has its own."""
    from pyarrow import compute

    lengths = compute.take(compute.binary_length(chunk.dictionary), chunk.indices)
    return compute.sum(compute.cast(lengths, "int64")).as_py() or 0


READERS: Mapping[str, Callable[[Path, Columns | None], tuple[Any, list[str]]]] = {
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
FORMAT = dict.fromkeys(READERS, open_frame)
