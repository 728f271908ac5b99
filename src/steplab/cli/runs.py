"""List, filter, delete, pack and unpack stored Runs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from steplab.cli.command import Command
from steplab.cli.flags import add_store_flag, file_to_write
from steplab.core import Cell, Column, Run, Status, Table, run_to_json, units
from steplab.core.codec import read_word
from steplab.core.errors import UserError
from steplab.report.export import write_table
from steplab.report.terminal import print_table
from steplab.store import Store, pack_runs, unpack_runs


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    add_selection_flags(parser)
    add = parser.add_argument
    add("--json", action="store_true", help="print the selected Runs in full, as JSON")
    add("--out", type=file_to_write("--out"), metavar="FILE",
        help="write the list as .csv, .md, .json or .svg")  # fmt: skip
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--delete", action="store_true", help="delete the selected Runs")
    action.add_argument(
        "--pack", type=file_to_write("--pack"), metavar="FILE", help="pack them into one file"
    )
    action.add_argument("--unpack", type=Path, metavar="FILE", help="add the Runs of such a file")


def _run(args: argparse.Namespace) -> int:
    store = Store(args.store)
    if args.unpack:
        added, known = unpack_runs(store, args.unpack)
        print(f"{added} Runs added to {store.root}, {known} were there already")
        return 0
    chosen = select_runs(store, args)
    if args.pack:
        ids = [run.id for run in readable_runs(chosen, "pack")]
        print(f"{pack_runs(store, ids, args.pack)} Runs packed into {args.pack}")
    elif args.delete:
        _delete(store, args, [run_id for run_id, _ in chosen])
    elif args.json:
        for _, run in chosen:
            if isinstance(run, UserError):
                raise run
            print(run_to_json(run))
    else:
        if args.out:
            write_table(_table(chosen, store, {}), args.out)
        print_table(_table(chosen, store, store.short_ids()))
    return 0


def _delete(store: Store, args: argparse.Namespace, ids: list[str]) -> None:
    if not is_selective(args):
        raise UserError(
            "--delete without a selection would delete every Run.",
            "Name ids, or filter with --workload, --status, --group or --newest.",
        )
    for run_id in ids:
        store.delete(run_id)
    print(f"{len(ids)} Runs deleted from {store.root}")


def _table(
    chosen: list[tuple[str, Run | UserError]], store: Store, short_ids: Mapping[str, str]
) -> Table:
    # What is left out last has the smallest number.
    names = {"workload": 2, "size": 3, "batch": 4, "mode": 5, "recipe": 1, "device": 6}
    columns = [Column("run", whole=True), Column("created", "UTC", whole=True, dispensable=7)]
    columns += [Column(name, dispensable=rank) for name, rank in names.items()]
    columns += [Column("step median", "ms"), Column("tokens/s"), Column("status")]
    rows: list[tuple[Cell, ...]] = []
    for run_id, run in chosen:
        shown = short_ids.get(run_id, run_id)
        if not isinstance(run, Run):
            rows.append((shown, *[""] * 9, f"unreadable: {run}"))
            continue
        time = run.clock.step.median if run.clock else ""
        speed = run.tokens_per_second
        about = (run.created[:16].replace("T", " "), *_spec_cells(run))
        rows.append((shown, *about, time, round(speed) if speed else "", _status(run)))
    return Table(f"{units.counted(len(rows), 'Run')} in {store.root}", tuple(columns), tuple(rows))


def _spec_cells(run: Run) -> tuple[Cell, ...]:
    """What was measured, from workload to device; `plain / precision=bf16` where two took turns."""
    specs = [run.spec] if run.against is None else [run.spec, run.against]
    sides = [(s.workload, s.size_words, s.batch, s.mode, s.recipe.label, s.device) for s in specs]
    distinct = [list(dict.fromkeys(values)) for values in zip(*sides, strict=True)]
    return tuple(one[0] if len(one) == 1 else " / ".join(map(str, one)) for one in distinct)


def _status(run: Run) -> str:
    """How a Run ended, what makes its numbers doubtful, and its tables where it has no time."""
    words: list[str] = [run.status, *(run.clock.caution_names if run.clock else ())]
    if not all(map(math.isfinite, run.losses)):
        words.append("loss not finite")
    if run.clock is None and run.tables:
        words.append(f"tables: {', '.join(run.tables)}")
    return ", ".join(words)


def add_selection_flags(parser: argparse.ArgumentParser) -> None:
    """Add the ids and filters that select Runs; `report` has them too."""
    add = parser.add_argument
    add("ids", nargs="*", help="Runs by id, by a unique part of it, or `last`; default: all")
    add_store_flag(parser)
    add("--workload", default=None, help="only Runs of this workload")
    statuses = partial(read_word, Status, where="--status")
    about = "only Runs that ended as ok, oom, failed, ..."
    add("--status", type=statuses, default=None, help=about)
    add(
        "--group",
        default=None,
        metavar="ID",
        help="only Runs of the sweep whose id begins with this",
    )
    add("--newest", type=int, default=0, metavar="N", help="only the N newest; 0: all")


def is_selective(args: argparse.Namespace) -> bool:
    """Whether the flags leave any Runs out."""
    return bool(args.ids or args.workload or args.status or args.group or args.newest)


def select_runs(store: Store, args: argparse.Namespace) -> list[tuple[str, Run | UserError]]:
    """Return the selected ids and Runs, oldest first; an error in place of an unreadable Run."""
    if args.newest < 0:
        raise UserError(f"--newest must not be negative, but is {args.newest}.")
    wanted = {store.resolve(name) for name in args.ids}
    chosen = []
    for run_id, run in store.all():
        if (not wanted or run_id in wanted) and _fits(run, args):
            chosen.append((run_id, run))
    return chosen[-args.newest :] if args.newest else chosen


def readable_runs(chosen: Sequence[tuple[str, Run | UserError]], purpose: str) -> list[Run]:
    """Return the Runs among the chosen that can be read; without any, say what is the matter."""
    runs = [run for _, run in chosen if isinstance(run, Run)]
    faults = [run for _, run in chosen if isinstance(run, UserError)]
    if not runs and faults:
        first = "" if len(faults) == 1 else "the first one: "
        raise UserError(
            f"There is no Run to {purpose}: {units.counted(len(faults), 'Run')} cannot be read "
            f"({first}{faults[0].message.rstrip('.')}).",
            faults[0].suggestion,
        )
    if not runs:
        raise UserError(f"There is no Run to {purpose}.", "List them with: steplab runs")
    return runs


def _fits(run: Run | UserError, args: argparse.Namespace) -> bool:
    """Whether a Run passes the filters; an unreadable one passes none."""
    asked = (args.workload, args.status, args.group)
    if not isinstance(run, Run):
        return asked == (None, None, None)
    group = run.group if args.group is None else run.group[: len(args.group)]
    has = (run.spec.workload, run.status, group)
    return all(a is None or a == b for a, b in zip(asked, has, strict=True))


COMMAND = Command(_flags, _run)
