"""Time training steps: size x context x batch x mode x recipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from steplab.bench.gated_trials import GatedTrials
from steplab.bench.sweep import key_of_size, search_batches, sweep
from steplab.cli.command import Command
from steplab.cli.flags import AUTO, add_out_flag, add_store_flag, resolve_device
from steplab.cli.progress import CellProgress, step_name
from steplab.cli.step_flags import (
    add_rank_flags,
    add_step_flags,
    add_workload_flags,
    assumed_device,
    step_grid,
)
from steplab.cli.sweeps import collect_runs, print_count, require_success
from steplab.compare.rank_table import rank_table
from steplab.compare.scaling import scaling_table
from steplab.compare.step_tables import (
    compilation_table,
    numeric_axes,
    phase_table,
    step_table,
    utilization_table,
)
from steplab.compare.versus import rounds_table, versus_table
from steplab.core import Environment, Run, RunSpec, Table, fingerprint
from steplab.core.errors import UserError
from steplab.core.run import new_run
from steplab.core.spec import axes_text, varying_axes
from steplab.report.export import write_table
from steplab.report.terminal import print_table
from steplab.store import Store
from steplab.workers.alternate import alternate_specs
from steplab.workers.trials import TrialRunner

DEFAULT_WORKLOAD = "gpt"


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    add_workload_flags(parser, words, DEFAULT_WORKLOAD, many=True)
    fields = ("warmup", "steps", "accumulate", "clip", "seed", "peak_tflops")
    add_step_flags(parser, fields, batch=4, many=True, auto_batch=True)
    add_rank_flags(parser, many=True)
    add = parser.add_argument
    add("--alternate", type=int, default=None, metavar="ROUNDS",
        help="compare two cells by alternating between them for ROUNDS rounds")  # fmt: skip
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help="seconds a cell may take")
    add_store_flag(parser)
    add_out_flag(parser)


def _run(args: argparse.Namespace) -> int:
    if not args.timeout > 0:
        raise UserError(f"--timeout must be more than 0 seconds, not {args.timeout}.")
    if args.alternate is not None and args.alternate < 1:
        raise UserError(f"--alternate must be 1 round or more, not {args.alternate}.")
    specs, refused = _plan(args, assumed_device(args.device))
    if args.alternate and len(specs) != 2:
        raise UserError(
            f"--alternate compares two cells, but the flags span {len(specs)}.",
            "Give one --mode, one --size and two recipes, for example.",
        )
    store = Store(args.store)
    store.check_writable()
    with TrialRunner(args.timeout) as trials:
        environment = trials.environment()
        device = resolve_device(args.device, environment)
        if device != specs[0].device:  # the default size is another one on a GPU
            specs, refused = _plan(args, device)
        if args.alternate:
            return _compare(args, specs, store, environment)
        measure = _search if AUTO in args.batch else partial(_measure, refused=refused)
        with GatedTrials(trials) as gated:
            runs = measure(args, specs, store, gated, environment)
    tables = _tables(runs, f"one training step of {args.workload}")
    _write(args.out, tables)  # before printing: a closed pipe must not cost the files
    for table in tables:
        print_table(table)
    print_count(runs, store)
    require_success(runs)
    return 0


def _tables(runs: list[Run], title: str) -> list[Table]:
    """Return the step table, then the others that are not empty."""
    details = [rank_table(runs), phase_table(runs), utilization_table(runs)]
    details += [compilation_table(runs)]
    details += [scaling_table(runs, axis) for axis in numeric_axes(runs)]
    return [step_table(runs, title), *(table for table in details if table is not None)]


def _plan(args: argparse.Namespace, device: str) -> tuple[list[RunSpec], dict[str, str]]:
    """Return the cells, and why some of them cannot be, by fingerprint."""
    if AUTO in args.batch and (len(args.batch) > 1 or args.alternate):
        raise UserError("--batch auto cannot be combined: it measures several batch sizes already.")
    specs, refused = step_grid(args, device)
    if refused and (AUTO in args.batch or args.alternate):
        raise UserError(next(iter(refused.values())))
    return specs, refused


def _measure(
    args: argparse.Namespace,
    specs: list[RunSpec],
    store: Store,
    trials: GatedTrials,
    environment: Environment,
    refused: Mapping[str, str],
) -> list[Run]:
    with CellProgress(len(specs), partial(step_name, among=specs)) as progress:
        cells = sweep(
            specs,
            store,
            trials,
            environment,
            sys.argv,
            # In a study of the warm-up a worker's first cell would warm the next.
            worker_key=fingerprint if len(args.warmup) > 1 else key_of_size,
            progress=progress.stage,
            say=progress.say,
            refused=refused,
        )
        return collect_runs(cells, len(specs), store, progress.done)


def _search(
    args: argparse.Namespace,
    specs: list[RunSpec],
    store: Store,
    trials: GatedTrials,
    environment: Environment,
) -> list[Run]:
    """Find the fastest batch of every cell; everything measured is in the table."""
    runs: list[Run] = []
    for spec in specs:
        with CellProgress(None, partial(step_name, among=specs)) as progress:
            found = search_batches(
                spec, store, trials, environment, sys.argv, progress.stage, progress.done
            )
        runs += found.runs
        best = f"batch {found.best.spec.batch}" if found.best else "none"
        axes = varying_axes(specs) or ["mode", "recipe"]
        print(f"fastest of {axes_text(spec, axes)}: {best} ({found.reason})")
    return runs


def _compare(
    args: argparse.Namespace, specs: list[RunSpec], store: Store, environment: Environment
) -> int:
    with CellProgress(1) as progress:
        first, second = alternate_specs(
            specs[0],
            specs[1],
            args.alternate,
            args.timeout,
            lambda text: progress.stage(specs[0], text),
        )
    conditions = environment.conditions_on(specs[0].device)
    table = versus_table(specs[0], first, specs[1], second, conditions)
    _write(args.out, [table])
    tables = {"versus": table, "rounds": rounds_table(first, second)}
    run = replace(new_run(specs[0], environment), against=specs[1], tables=tables)
    saved = store.save(run)
    print_table(table)
    print(f"saved {saved}")
    return 0


def _write(paths: Sequence[Path], tables: list[Table]) -> None:
    for path in paths:
        for index, table in enumerate(tables):
            suffix = f".{table.title.replace(' ', '-')}{path.suffix}" if index else path.suffix
            write_table(table, path.with_suffix(suffix))


COMMAND = Command(_flags, _run)
