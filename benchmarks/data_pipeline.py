"""Windows per second of the data pipeline, against reading whole sequences and slicing them.

    PYTHONPATH=src python benchmarks/data_pipeline.py [--gib N] [--folder DIR] [--out FILE]

Writes a Time-300B folder of random series, reads random windows from it in several ways, and
deletes it. A cold row drops the files from the page cache before every repeat, a warm one reads
them all before the first.
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
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from steplab.cli.command import Parser
from steplab.core import Cell, Column, Samples, Table
from steplab.core.errors import SteplabError, UserError
from steplab.data.formats import open_series
from steplab.data.formats.time300b import META, write_time300b
from steplab.data.loader import Loader
from steplab.data.sampling import Order, Position
from steplab.data.windows import NormalizeMode, Windows
from steplab.probes.environment import capture_environment
from steplab.report.export import write_table
from steplab.report.terminal import print_table

SEQUENCE = 4096
WINDOW = SEQUENCE + 1  # the last point is only a target
BATCH = 16
SEED = 0
SERIES_POINTS = (2**14, 2**19)  # 64 KiB to 2 MiB: stations of weather and energy sets
PART_ELEMENTS = 2**27  # 512 MiB, so that a set of a few GiB has several files
WINDOW_MB = WINDOW * 4 / 1e6

REPEAT = 64  # batches

Repeat = Callable[[int], float]  # reads REPEAT batches, others for every number; seconds


def main() -> int:
    """Measure, print the table and write it if asked to; return the exit code."""
    parser = Parser("data_pipeline.py", "How fast windows are read.")
    parser.add_argument("--gib", type=float, default=2.0, help="size of the generated set, GiB")
    parser.add_argument("--seconds", type=float, default=5.0, help="time for every row")
    parser.add_argument(
        "--folder", type=Path, help="where to create it (default: the temporary folder)"
    )
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
    yardstick: dict[str, float] = {}
    for name, threads, make in ways(folder):
        for state in ("cold", "warm"):
            rates = measure(folder, make(), state == "cold", args.seconds)
            yardstick.setdefault(state, rates.median)
            spread = (rates.percentile(10), rates.median, rates.percentile(90))
            speed = (rates.median * WINDOW_MB, 1e3 * BATCH / rates.median)
            rows.append((name, threads, state, *spread, *speed, rates.median / yardstick[state]))
    columns = [("way", ""), ("threads", ""), ("page cache", ""), ("10th percentile", "windows/s")]
    columns += [("median", "windows/s"), ("90th", "windows/s"), ("useful", "MB/s")]
    columns += [("batch", "ms"), ("ratio", "x")]
    total = sum(path.stat().st_size for path in folder.glob("*.bin"))
    environment = capture_environment()
    return Table(
        title=f"Random windows of {WINDOW:,} points, batches of {BATCH}",
        columns=tuple(Column(name, unit) for name, unit in columns),
        rows=tuple(rows),
        note=f"{total / 2**30:.2f} GiB of float32 in {len(open_series(folder)):,} series of "
        f"{SERIES_POINTS[0]:,} to {SERIES_POINTS[1]:,} points; repeats of {REPEAT * BATCH:,} "
        f"windows for {args.seconds:g} s. Ratio: to whole sequences in the same cache.\n"
        "'first touch' reads a whole series at its first window, for its mean and std; 'known' "
        f"has read all of them.\n{environment.conditions}, {environment.cores} cores",
    )


def measure(folder: Path, repeat: Repeat, cold: bool, limit_s: float) -> Samples:
    """Return windows/s, one value per repeat; the first repeat of a warm row is warm-up."""
    rates: list[float] = []
    end = perf_counter() + limit_s
    if not cold:
        touch(folder)
        repeat(0)
    while len(rates) < 3 or perf_counter() < end:
        if cold:
            forget(folder)
        rates.append(REPEAT * BATCH / repeat(1 + len(rates)))
    return Samples(tuple(rates), "windows/s")


def ways(folder: Path) -> Iterator[tuple[str, int, Callable[[], Repeat]]]:
    """Yield (name, threads, how to start) for every way of reading; the yardstick is first."""
    yield "whole sequence, then slice", 1, partial(whole_sequences, folder)
    yield "whole sequence, scaled, then slice", 1, partial(whole_sequences, folder, scaled=True)
    for threads in (1, 2):
        yield "Loader, not normalized", threads, partial(loading, folder, "none", threads)
    yield "Loader, by series, first touch", 2, partial(loading, folder, "series", 2)
    yield "Loader, by series, known", 2, partial(loading, folder, "series", 2, known=True)


def loading(folder: Path, normalize: NormalizeMode, threads: int, known: bool = False) -> Repeat:
    """Return repeats by a Loader over newly opened files: mapped pages do not leave the cache."""
    series = Reopened(folder)
    windows = Windows(series, WINDOW, SEQUENCE, normalize)
    if known:
        for window in range(len(windows)):
            windows.read(window)
        series.open()

    def repeat(number: int) -> float:
        chosen = windows if known else Windows(series, WINDOW, SEQUENCE, normalize)
        start = perf_counter()
        position = place(number, len(windows))
        with Loader(chosen, BATCH, SEED, "cpu", position, workers=threads) as loader:
            for _ in range(REPEAT):
                next(loader)
            seconds = perf_counter() - start
        series.open()
        return seconds

    return repeat


def place(number: int, windows: int) -> Position:
    """Return where a repeat begins: epochs have as many whole repeats as fit."""
    fit = max(1, windows // (REPEAT * BATCH))
    return Position(number // fit, number % fit * REPEAT * BATCH)


class Reopened:
    """A set whose files can be let go of, while what was learned about them stays."""

    def __init__(self, folder: Path) -> None:
        self.name, self._folder = str(folder), folder
        self.open()
        self.lengths = self._series.lengths

    def open(self) -> None:
        """Map the files anew; the old mapping and its pages are let go of."""
        self._series = open_series(self._folder)

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, index: int, start: int, stop: int) -> NDArray[np.float32]:
        """Return points [start, stop) of series `index`."""
        return self._series.read(index, start, stop)


def whole_sequences(folder: Path, scaled: bool = False) -> Repeat:
    """Return repeats that open the file, seek, read the sequence whole and slice the window.

    Scaled: the z-score of the sequence is computed at every access, in float32.
    """
    windows = Windows(open_series(folder), WINDOW, SEQUENCE, "none")
    meta = json.loads((folder / META).read_text())

    def repeat(number: int) -> float:
        start_s = perf_counter()
        begin = place(number, len(windows))
        order = Order(len(windows), SEED, begin.epoch)
        for first in range(begin.index, begin.index + REPEAT * BATCH, BATCH):
            rows = []
            for window in order[np.arange(first, first + BATCH)].tolist():
                series, start = windows.locate(window)
                sequence = read_sequence(folder, meta, **meta["scales"][series])
                if scaled:
                    sequence = (sequence - sequence.mean()) / sequence.std()
                rows.append(sequence[start : start + WINDOW])
            torch.from_numpy(np.stack(rows))
        return perf_counter() - start_s

    return repeat


def read_sequence(
    folder: Path, meta: dict[str, Any], offset: int, length: int
) -> NDArray[np.float32]:
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


def random_series(points: int) -> Iterator[NDArray[np.float32]]:
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
