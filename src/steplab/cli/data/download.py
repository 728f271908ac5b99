"""Download Time-300B from the Hugging Face hub."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from steplab.cli.command import Command
from steplab.cli.flags import folder_to_write
from steplab.core import Column, Table, units
from steplab.core.errors import UserError
from steplab.report.terminal import print_table


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    add = parser.add_argument
    add("partition", nargs="?", default="", help="domain or dataset, as shown by --list")
    add("--out", type=folder_to_write("--out"), default="time300b", help="folder for the data")
    add("--list", action="store_true", help="list the domains, or the datasets of a domain")


def _run(args: argparse.Namespace) -> int:
    from steplab.data.formats import open_series
    from steplab.data.hub import REPOSITORY, download, list_files, partitions

    if not args.partition and not args.list:
        raise UserError("Which partition?", "List them with: steplab data download --list")
    files = list_files()
    if args.list:
        found = partitions(files, args.partition)
        rows = tuple((part.name, part.datasets, units.bytes_(part.size)) for part in found)
        columns = (Column("partition"), Column("datasets"), Column("size"))
        print_table(Table(f"{REPOSITORY} on the Hugging Face hub", columns, rows))
        return 0
    folder = download(files, args.partition, args.out)
    series = open_series(folder)
    print(f"{folder}: {len(series):,} series, {int(series.lengths.sum()):,} points")
    print(f"next: steplab train --dataset-path {folder}")
    return 0


COMMAND = Command(_flags, _run)
