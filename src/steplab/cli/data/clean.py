"""Cut out what is missing, flat or too short."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from steplab.cli.command import Command
from steplab.cli.flags import folder_to_write
from steplab.cli.progress import ItemProgress
from steplab.core import Cell, Column, Table
from steplab.core.atomic import disk_errors, write_file
from steplab.core.codec import encode
from steplab.core.errors import UserError
from steplab.report.terminal import print_table

if TYPE_CHECKING:
    from steplab.data.clean import CleaningCounts, CleaningRule


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    add = parser.add_argument
    add("path", type=Path, metavar="IN", help="folder or file of series")
    add("--out", type=folder_to_write("--out"), required=True,
        help="new folder, in the Time-300B layout")  # fmt: skip
    add("--flat-window", type=int, default=128, help="points per window that is judged as one")
    add("--flat-share", type=float, default=0.2,
        help="share of zero first or second differences above which a window is dropped; "
        "1 keeps all")  # fmt: skip
    add("--shortest", type=int, default=16, help="points of the shortest run that is kept")


def _run(args: argparse.Namespace) -> int:
    from steplab.data.clean import CleaningRule, clean
    from steplab.data.formats import CLEANING_REPORT, open_series
    from steplab.data.formats.time300b import SeriesWriter, verify
    from steplab.data.series import notes

    rule = CleaningRule(args.flat_window, args.flat_share, args.shortest)
    series = open_series(args.path)
    for note in notes(series):
        print(f"note: {note}")
    with disk_errors(args.out, "--out"):
        with (
            ItemProgress("points", int(series.lengths.sum())) as progress,
            SeriesWriter(args.out) as writer,
        ):
            counts = clean(series, rule, writer, progress.advance)
        print_table(_table(str(args.path), counts))
        if not counts.kept_series:
            raise UserError(
                f"Nothing is left of {args.path}, so {args.out} was not written.",
                "The table above shows what was dropped; --flat-share and --shortest decide.",
            )
        verify(writer)
        report = _report(str(args.path), rule, counts)
        write_file(args.out / CLEANING_REPORT, report.encode())
    print(f"{args.out}: written and verified; the report is in {args.out / CLEANING_REPORT}")
    return 0


def _report(source: str, rule: CleaningRule, counts: CleaningCounts) -> str:
    record = {"source": source, "rule": encode(rule), "tally": encode(counts)}
    return json.dumps(record, indent=1) + "\n"


def _table(source: str, counts: CleaningCounts) -> Table:
    from steplab.data.clean import REASONS

    rows: list[tuple[Cell, ...]] = [("read", counts.points, 100.0, counts.series)]
    for reason in REASONS:
        points = counts.dropped_points[reason]
        row = (f"dropped: {reason}", points, _percent(points, counts), counts.dropped_from[reason])
        rows.append(row)
    rows.append(
        ("kept", counts.kept_points, _percent(counts.kept_points, counts), counts.kept_series)
    )
    columns = (Column("what"), Column("points"), Column("share", "%"), Column("series"))
    note = (
        f"In a `dropped` row, series are those that lost points for this reason; in `kept`, the "
        f"runs that were written. Nothing is left of {counts.lost_series:,} series."
    )
    return Table(f"cleaning {source}", columns, tuple(rows), note)


def _percent(points: int, counts: CleaningCounts) -> float:
    return 100 * points / max(counts.points, 1)


COMMAND = Command(_flags, _run)
