"""Write stored Runs as one HTML file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from steplab.cli.command import Command
from steplab.cli.flags import page_to_write
from steplab.cli.runs import add_selection_flags, readable_runs, select_runs
from steplab.core import units
from steplab.core.errors import UserError
from steplab.report.pages import write_runs_page
from steplab.store import Store


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    add_selection_flags(parser)
    about = "the file to write (.html)"
    parser.add_argument("--out", type=page_to_write("--out"), default="report.html", help=about)


def _run(args: argparse.Namespace) -> int:
    store = Store(args.store)
    chosen = select_runs(store, args)
    runs = readable_runs(chosen, "report")
    write_runs_page(runs, args.out)
    print(f"{units.counted(len(runs), 'Run')} in {args.out}")
    for run_id, run in chosen:
        if isinstance(run, UserError):
            print(f"left out {run_id}: {run.message}")
    return 0


COMMAND = Command(_flags, _run)
