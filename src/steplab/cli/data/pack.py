"""Write any series as a Time-300B folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from steplab.cli.command import Command
from steplab.cli.flags import folder_to_write
from steplab.cli.progress import ItemProgress
from steplab.core import units
from steplab.core.atomic import disk_errors


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    add = parser.add_argument
    add("paths", nargs="+", type=Path, metavar="IN", help="folders or files of series")
    add("--out", type=folder_to_write("--out"), required=True,
        help="new folder, in the Time-300B layout")  # fmt: skip


def _run(args: argparse.Namespace) -> int:
    from steplab.data.formats import open_series
    from steplab.data.formats.time300b import pack_sets
    from steplab.data.series import notes
    from steplab.data.stats import bytes_on_disk

    sets = [open_series(path) for path in args.paths]
    for series in sets:
        for note in notes(series):
            print(f"note: {note}")
    points = sum(int(series.lengths.sum()) for series in sets)
    with disk_errors(args.out, "--out"), ItemProgress("points", points) as progress:
        packed = pack_sets(sets, args.out, progress.advance)
    size = units.bytes_(bytes_on_disk(args.out))
    print(
        f"{args.out}: {packed.series:,} series, {packed.points:,} points of float32, {size}; "
        "verified"
    )
    return 0


COMMAND = Command(_flags, _run)
