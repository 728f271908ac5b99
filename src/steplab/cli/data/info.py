"""Say what a set of series holds and what training would use."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from steplab.cli.command import Command
from steplab.cli.flags import add_out_flag
from steplab.cli.progress import ItemProgress
from steplab.core import Cell, Column, Table, units
from steplab.report.export import write_table
from steplab.report.terminal import print_table
from steplab.workloads.tsmoe.config import TsmoeConfig

if TYPE_CHECKING:
    from steplab.data.series import SeriesSet
    from steplab.data.stats import SeriesStats


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    add = parser.add_argument
    add("path", type=Path, help="folder or file of series, or shipped:NAME")
    add("--seq-max-len", type=int, default=TsmoeConfig.seq_max_len, help="points per window")
    add(
        "--seq-stride",
        type=int,
        default=0,
        help="points between windows; 0 means the length of a window",
    )
    add_out_flag(parser)


def _run(args: argparse.Namespace) -> int:
    from steplab.data.formats import open_series, resolve_path
    from steplab.data.series import notes
    from steplab.data.stats import bytes_on_disk, series_stats
    from steplab.data.windows import check_window

    stride = args.seq_stride or args.seq_max_len
    check_window(args.seq_max_len + 1, stride)
    series = open_series(args.path)
    with ItemProgress("points", int(series.lengths.sum())) as progress:
        stats = series_stats(series, progress.advance)
    rows = _rows(stats, bytes_on_disk(resolve_path(args.path)))
    rows += _training_rows(series, args.seq_max_len + 1, stride)
    columns = (Column("what"), Column("value"), Column("unit"))
    table = Table(str(args.path), columns, tuple(rows))
    for path in args.out:
        write_table(table, path)
    print_table(table)
    for note in notes(series):
        print(f"note: {note}")
    return 0


def _rows(stats: SeriesStats, size: int) -> list[tuple[Cell, ...]]:
    named = [f"{step} ({count:,})" for step, count in stats.time_steps.items()]
    steps = next(iter(stats.time_steps)) if len(stats.time_steps) == 1 else ", ".join(named[:3])
    return [
        ("series", stats.series, ""),
        ("points", stats.points, ""),
        ("shortest series", stats.shortest, "points"),
        ("median series", stats.median, "points"),
        ("longest series", stats.longest, "points"),
        ("NaN or Inf", 100 * stats.missing_share, "% of points"),
        ("flat", 100 * stats.flat_share, "% of points, equal to the one before"),
        ("step", steps or None, "in time" if steps else "the format has no times"),
        ("size", units.bytes_(size), "on disk"),
    ]


def _training_rows(series: SeriesSet, length: int, stride: int) -> list[tuple[Cell, ...]]:
    from steplab.data.packing import window_stats

    rows: list[tuple[Cell, ...]] = []
    for packed, how in ((False, ""), (True, " with --pack")):
        found = window_stats(series.lengths, length, stride, 1, packed)
        rows += [
            (f"windows{how}", found.windows, f"of {length:,} points"),
            (f"padding{how}", 100 * found.padding, "% of the windows"),
            (f"unused{how}", 100 * found.unused, "% of points, in no window"),
        ]
    return rows


COMMAND = Command(_flags, _run)
