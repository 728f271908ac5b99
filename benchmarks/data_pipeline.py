"""Windows per second of the data pipeline, against reading whole sequences and slicing them.

    PYTHONPATH=src python benchmarks/data_pipeline.py [--gib N] [--folder DIR] [--out FILE]

Writes a Time-300B folder of random series, reads random windows from it in several ways, and
deletes it. The page cache is emptied of these files before a cold row and warmed before a warm one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from steplab.cli.command import Parser
from steplab.data.loader import Loader
from steplab.data.order import Order
from steplab.data.series import open_series
from steplab.data.time300b import META, write_time300b
from steplab.data.windows import Windows
from steplab.errors import SteplabError, UserError
from steplab.probes.environment import capture
from steplab.record import Column, Table
from steplab.record.table import Cell
from steplab.report.export import write_table
from steplab.report.terminal import print_table

SEQUENCE = 4096
WINDOW = SEQUENCE + 1  # the last point is only a target
BATCH = 16
SEED = 0
SERIES_POINTS = (2**14, 2**19)  # 64 KiB to 2 MiB: stations of weather and energy sets
PART_ELEMENTS = 2**27  # 512 MiB, so that a set of a few GiB has several files
WINDOW_MB = WINDOW * 4 / 1e6

Run = Callable[[int], None]  # reads that many batches


def main() -> int:
    """Measure, print the table and write it where asked; return the exit code."""
    parser = Parser("data_pipeline.py", "How fast windows are read.")
    parser.add_argument("--gib", type=float, default=2.0, help="size of the generated set, GiB")
    parser.add_argument("--seconds", type=float, default=5.0, help="time for every row")
    parser.add_argument("--folder", type=Path, help="where to make it (default: the temp folder)")
    parser.add_argument("--out", type=Path, help="also write the table here (.md, .json or .csv)")
    try:
        args = parser.parse(sys.argv[1:])
        if args.gib <= 0 or args.seconds <= 0:
            raise UserError("--gib and --seconds must be above 0.")
        if not hasattr(os, "posix_fadvise"):
            raise UserError("The page cache can be emptied on Linux only.")
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            table = measure_all(Path(folder) / "set", args)
        print_table(table)
        if args.out:
            write_table(table, args.out)
    except SteplabError as error:
        print(f"data_pipeline.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def measure_all(folder: Path, args: argparse.Namespace) -> Table:
    """Return one row per way of reading and state of the page cache."""
    torch.set_num_threads(1)
    write_time300b(folder, random_series(int(args.gib * 2**28)), PART_ELEMENTS)
    rows: list[tuple[Cell, ...]] = []
    slowest: dict[str, float] = {}
    for name, threads, make in ways(folder):
        for state, prepare in (("cold", forget), ("warm", touch)):
            prepare(folder)
            seconds, batches = timed(make(), args.seconds)
            rate = batches * BATCH / seconds
            slowest.setdefault(state, rate)
            milliseconds = 1e3 * seconds / batches
            row = (name, threads, state, batches * BATCH, rate, rate * WINDOW_MB, milliseconds)
            rows.append((*row, rate / slowest[state]))
    columns = [("way", ""), ("threads", ""), ("page cache", ""), ("windows", "")]
    columns += [("rate", "windows/s"), ("useful", "MB/s"), ("batch", "ms"), ("ratio", "x")]
    total = sum(path.stat().st_size for path in folder.glob("*.bin"))
    count = len(open_series(folder))
    return Table(
        title=f"Random windows of {WINDOW:,} points, batches of {BATCH}",
        columns=tuple(Column(name, unit) for name, unit in columns),
        rows=tuple(rows),
        note=f"{total / 2**30:.2f} GiB of float32 in {count:,} series of {SERIES_POINTS[0]:,} to "
        f"{SERIES_POINTS[1]:,} points. Ratio: to whole sequences in the same state of the cache.\n"
        "'first touch' reads a series whole when it is met first, for its mean and std; 'known' "
        f"has met all of them.\n{capture().conditions}, {capture().cores} cores",
    )


def ways(folder: Path) -> Iterator[tuple[str, int, Callable[[], Run]]]:
    """Yield (name, threads, how to start) for every way of reading; the yardstick is first."""
    yield "whole sequence, then slice", 1, partial(whole_sequences, folder)
    for threads in (1, 2):
        raw = partial(windows_of, folder, "none")
        yield "Loader, not normalised", threads, partial(loader_over, raw, threads)
    scaled = partial(windows_of, folder, "series")
    yield "Loader, by series, first touch", 2, partial(loader_over, scaled, 2)
    known = windows_of(folder, "series")
    for window in np.unique(np.searchsorted(known._ends, np.arange(len(known)), "right")):
        known._normaliser.usable(int(window))
    yield "Loader, by series, known", 2, partial(loader_over, lambda: known, 2)


def windows_of(folder: Path, normalise: str) -> Windows:
    """Open the set anew, with no statistics remembered."""
    return Windows(open_series(folder), WINDOW, SEQUENCE, normalise)


def loader_over(make: Callable[[], Windows], threads: int) -> Run:
    """Return a run that takes batches from a Loader."""
    loader = Loader(make(), BATCH, SEED, "cpu", workers=threads)

    def run(batches: int) -> None:
        for _ in range(batches):
            next(loader)

    return run


def whole_sequences(folder: Path) -> Run:
    """Return a run that opens the file, seeks, reads the sequence whole and slices the window."""
    windows = windows_of(folder, "none")
    order = Order(len(windows), SEED, 0)
    meta = json.loads((folder / META).read_text())
    place = iter(range(len(windows)))

    def run(batches: int) -> None:
        for _ in range(batches):
            rows = []
            for _ in range(BATCH):
                series, start = windows.locate(order[next(place)])
                sequence = read_sequence(folder, meta, **meta["scales"][series])
                rows.append(sequence[start : start + WINDOW])
            torch.from_numpy(np.stack(rows))

    return run


def read_sequence(folder: Path, meta: dict, offset: int, length: int) -> np.ndarray:
    """Read one sequence whole, from as many files as it lies in."""
    pieces, begin = [], 0
    for name, count in meta["files"].items():
        first, last = max(offset, begin), min(offset + length, begin + count)
        if first < last:
            with (folder / name).open("rb") as file:
                file.seek((first - begin) * 4)
                pieces.append(np.frombuffer(file.read((last - first) * 4), np.float32))
        begin += count
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def timed(run: Run, limit_s: float) -> tuple[float, int]:
    """Return (seconds, batches) of a run that lasts about `limit_s`."""
    batches, start = 0, perf_counter()
    while perf_counter() - start < limit_s:
        run(4)
        batches += 4
    return perf_counter() - start, batches


def random_series(points: int) -> Iterator[np.ndarray]:
    """Yield random walks until `points` are made; lengths are spread evenly on a log scale."""
    random = np.random.default_rng(SEED)
    low, high = np.log(SERIES_POINTS)
    while points > 0:
        length = min(points, int(np.exp(random.uniform(low, high))))
        yield random.standard_normal(length, np.float32).cumsum()
        points -= length


def forget(folder: Path) -> None:
    """Write the files to disk and drop their pages from the cache."""
    for path in folder.glob("*.bin"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def touch(folder: Path) -> None:
    """Read all files once, so that they lie in the page cache."""
    for path in folder.glob("*.bin"):
        with path.open("rb") as file:
            while file.read(2**24):
                pass


if __name__ == "__main__":
    sys.exit(main())
