"""List, filter, delete, pack and unpack stored Runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from steplab.cli.command import Command
from steplab.cli.selection import add_selection_flags, is_selective, select_runs
from steplab.core import Cell, Column, Run, Table, run_to_json, units
from steplab.core.errors import UserError
from steplab.report.export import write_table
from steplab.report.terminal import print_table
from steplab.store import Store, pack_runs, unpack_runs


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    add_selection_flags(parser)
    add = parser.add_argument
    add("--json", action="store_true", help="print the selected Runs whole, as JSON")
    add("--out", type=Path, default=None, help="write the list as .csv, .md, .json or .svg")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--delete", action="store_true", help="delete the selected Runs")
    action.add_argument("--pack", type=Path, metavar="FILE", help="pack them into one file")
    action.add_argument("--unpack", type=Path, metavar="FILE", help="add the Runs of a pack")


def _run(args: argparse.Namespace) -> int:
    store = Store(args.store)
    if args.unpack:
        added, known = unpack_runs(store, args.unpack)
        print(f"{added} Runs added to {store.root}, {known} were there already")
        return 0
    chosen = select_runs(store, args)
    if args.pack:
        readable = [run_id for run_id, run in chosen if isinstance(run, Run)]
        if not readable:
            raise UserError("There is no Run to pack.", "List them with: steplab runs")
        print(f"{pack_runs(store, readable, args.pack)} Runs packed into {args.pack}")
    elif args.delete:
        _delete(store, args, [run_id for run_id, _ in chosen])
    elif args.json:
        for _, run in chosen:
            if isinstance(run, UserError):
                raise run
            print(run_to_json(run))
    else:
        table = _table(chosen, store)
        if args.out:
            write_table(table, args.out)
        print_table(table)
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


def _table(chosen: list[tuple[str, Run | UserError]], store: Store) -> Table:
    names = ("run", "workload", "size", "batch", "mode", "recipe", "device")
    columns = [Column(name, whole=name == "run") for name in names]
    columns += [Column("step median", "ms"), Column("tokens/s"), Column("status")]
    rows: list[tuple[Cell, ...]] = []
    for run_id, run in chosen:
        if not isinstance(run, Run):
            rows.append((run_id, *[""] * 8, f"unreadable: {run}"))
            continue
        spec = run.spec
        time = run.clock.step.median if run.clock else ""
        speed = run.tokens_per_second
        rows.append(
            (
                *(run_id, spec.workload, spec.size, spec.batch, spec.mode, spec.recipe.label),
                *(spec.device, time, round(speed) if speed else "", run.status),
            )
        )
    return Table(f"{units.counted(len(rows), 'Run')} in {store.root}", tuple(columns), tuple(rows))


COMMAND = Command(_flags, _run)
