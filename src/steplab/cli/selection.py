"""Which stored Runs a command is about: by name, or by what they are."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from steplab.core import Run, Status
from steplab.core.codec import read_word
from steplab.core.errors import UserError
from steplab.store import DEFAULT_ROOT, Store


def add_selection_flags(parser: argparse.ArgumentParser) -> None:
    """Add the ids and the filters."""
    add = parser.add_argument
    add("ids", nargs="*", help="Runs by id, by a unique part of it, or `last`; none: all")
    add("--store", type=Path, default=DEFAULT_ROOT, help="folder of the Runs")
    add("--workload", default=None, help="only Runs of this workload")
    statuses = partial(read_word, Status, where="--status")
    about = "only Runs that ended so: ok, oom, failed, ..."
    add("--status", type=statuses, default=None, help=about)
    add("--group", default=None, help="only Runs of the sweep whose id begins so")
    add("--newest", type=int, default=0, metavar="N", help="only the N newest; 0: all")


def is_selective(args: argparse.Namespace) -> bool:
    """Whether anything was asked for that leaves Runs out."""
    return bool(args.ids or args.workload or args.status or args.group or args.newest)


def select_runs(store: Store, args: argparse.Namespace) -> list[tuple[str, Run | UserError]]:
    """Return ids and Runs, the oldest first; a Run that cannot be read is its error."""
    if args.newest < 0:
        raise UserError(f"--newest must not be negative, but is {args.newest}.")
    wanted = {store.resolve(name) for name in args.ids}
    chosen = []
    for run_id, run in store.all():
        if (not wanted or run_id in wanted) and _fits(run, args):
            chosen.append((run_id, run))
    return chosen[-args.newest :] if args.newest else chosen


def _fits(run: Run | UserError, args: argparse.Namespace) -> bool:
    """Whether a Run passes the filters; one that cannot be read passes none."""
    asked = (args.workload, args.status, args.group)
    if not isinstance(run, Run):
        return asked == (None, None, None)
    group = run.group if args.group is None else run.group[: len(args.group)]
    has = (run.spec.workload, run.status, group)
    return all(a is None or a == b for a, b in zip(asked, has, strict=True))
