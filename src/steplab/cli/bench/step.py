"""Time training steps: size x context x batch x mode x recipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from steplab.bench.sweep import Grid, plan, search_batches, sweep
from steplab.cli.command import Command
from steplab.cli.flags import (
    add_config_flags,
    add_workload_argument,
    given_fields,
    resolve_device,
    workload_name,
)
from steplab.cli.progress import CellProgress
from steplab.compare.scaling import scaling_table
from steplab.compare.step_tables import (
    compilation_table,
    numeric_axes,
    phase_table,
    step_table,
    utilization_table,
)
from steplab.compare.versus import rounds_table, versus_table
from steplab.core import MODES, Environment, Run, RunSpec, Table, new_run_id, units
from steplab.core.errors import MeasurementError, UserError
from steplab.core.run import now
from steplab.report.export import check_suffixes, write_table
from steplab.report.terminal import console, print_table
from steplab.store import DEFAULT_ROOT, Store
from steplab.techniques.recipes import parse_recipe
from steplab.workers.client import TrialRunner, alternate
from steplab.workloads.workload import WorkloadEntry, find_workload

DEFAULT_WORKLOAD = "gpt"
AUTO = "auto"


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    entry = add_workload_argument(parser, words, DEFAULT_WORKLOAD)
    add = parser.add_argument
    sizes = ", ".join(entry.presets) or "this workload has none"
    add("--size", nargs="+", default=[], help=f"presets ({sizes}); none: by the device")
    add("--batch", nargs="+", type=_batch, default=[4],
        help="sequences per micro-batch; auto: the fastest that fits")  # fmt: skip
    add("--mode", nargs="+", default=list(MODES), help="how far the step goes")
    add("--recipe", nargs="+", default=["plain"],
        help="plain, technique=value,..., a preset or a file")  # fmt: skip
    add("--warmup", nargs="+", type=int, default=[5], help="untimed steps; several: a study")
    add("--steps", type=int, default=10, help="timed steps")
    add("--accumulate", type=int, default=1, help="micro-batches per step")
    add("--clip", type=float, default=1.0, help="largest gradient norm; 0 for none")
    add("--seed", type=int, default=42, help="of weights and data")
    add("--device", default="auto", help="cpu, cuda, or auto")
    add("--mfu-peak-tflops", type=float, default=None, help="dense peak to use for MFU")
    add("--alternate", type=int, default=0, metavar="ROUNDS",
        help="measure two cells in turns for so many rounds and compare them")  # fmt: skip
    add("--timeout", type=float, default=600.0, help="seconds a cell may take")
    add("--store", type=Path, default=DEFAULT_ROOT, help="folder of the Runs")
    add("--out", nargs="+", type=Path, default=[], help="also write .csv, .md, .json or .svg")
    add_config_flags(parser, entry.config, many=True)


def _run(args: argparse.Namespace) -> int:
    name = workload_name(args)
    entry = find_workload(name)
    # Planned once before a worker is started (2 s), so that a slip of the pen is told at once.
    check_suffixes(args.out)
    if not args.timeout > 0:
        raise UserError(f"--timeout must be more than 0 seconds, not {args.timeout}.")
    specs, _ = _plan(args, entry, name, "cpu" if args.device == "auto" else args.device)
    if args.alternate < 0 or (args.alternate and len(specs) != 2):
        raise UserError(
            f"--alternate compares two cells, but the flags span {len(specs)}.",
            "Give one --mode, one --size and two recipes, for example.",
        )
    store = Store(args.store)
    store.check_writable()
    with TrialRunner(args.timeout) as isolation:
        environment = isolation.environment()
        specs, grid = _plan(args, entry, name, resolve_device(args.device, environment))
        if args.alternate:
            return _compare(args, specs, store, environment)
        measure = _search if AUTO in args.batch else _measure
        runs = measure(args, specs, grid, store, isolation, environment)
    tables = _tables(runs, f"one training step of {name}")
    _write(args.out, tables)  # before printing: a reader that goes away must not cost the files
    for table in tables:
        print_table(table)
    print(f"{units.counted(len(runs), 'Run')} in {store.root}; list them with: steplab runs")
    if all(run.status != "ok" for run in runs):
        reason = runs[0].reason.rstrip(".")
        raise MeasurementError(f"No cell could be measured; the first: {reason}.")
    return 0


def _tables(runs: list[Run], title: str) -> list[Table]:
    """The step table first, then those that have something to say."""
    details = [phase_table(runs), utilization_table(runs), compilation_table(runs)]
    details += [scaling_table(runs, axis) for axis in numeric_axes(runs)]
    return [step_table(runs, title), *(table for table in details if table is not None)]


def _plan(
    args: argparse.Namespace, entry: WorkloadEntry, name: str, device: str
) -> tuple[list[RunSpec], Grid]:
    default_size = entry.gpu_preset if device == "cuda" else entry.cpu_preset
    if AUTO in args.batch and (len(args.batch) > 1 or args.alternate):
        raise UserError("--batch auto stands alone: it measures several batches by itself.")
    grid = Grid(
        sizes=args.size or [default_size],
        overrides=given_fields(args),
        batches=[1] if AUTO in args.batch else args.batch,
        modes=args.mode,
        recipes=[parse_recipe(text) for text in args.recipe],
        warmups=args.warmup,
    )
    template = RunSpec(
        name,
        device=device,
        steps=args.steps,
        accumulate=args.accumulate,
        clip=args.clip,
        seed=args.seed,
        peak_tflops=args.mfu_peak_tflops,
        source=entry.source,
    )
    return plan(entry, grid, template), grid


def _measure(
    args: argparse.Namespace,
    specs: list[RunSpec],
    grid: Grid,
    store: Store,
    isolation: TrialRunner,
    environment: Environment,
) -> list[Run]:
    runs: list[Run] = []
    with CellProgress(len(specs)) as progress:
        cells = sweep(
            *(specs, store, isolation, environment, sys.argv, grid.studies_warmup),
            *(progress.stage, progress.say),
        )
        try:
            for run in cells:
                runs.append(run)
                progress.done(run)
        except KeyboardInterrupt:
            message = f"interrupted: {len(runs)} of {len(specs)} cells are in {store.root}."
            console(sys.stderr).print(f"{message} The same command goes on from there.")
            raise
    return runs


def _search(
    args: argparse.Namespace,
    specs: list[RunSpec],
    grid: Grid,
    store: Store,
    isolation: TrialRunner,
    environment: Environment,
) -> list[Run]:
    """Find the fastest batch of every cell; all that was measured stands in the table."""
    runs: list[Run] = []
    for spec in specs:
        with CellProgress(None) as progress:
            found = search_batches(
                *(spec, store, isolation, environment, sys.argv, progress.stage, progress.done)
            )
        runs += found.runs
        best = f"batch {found.best.spec.batch}" if found.best else "none"
        print(f"fastest of {spec.mode}, {spec.recipe.label}: {best} ({found.reason})")
    return runs


def _compare(
    args: argparse.Namespace, specs: list[RunSpec], store: Store, environment: Environment
) -> int:
    with CellProgress(1) as progress:
        first, second = alternate(
            specs[0],
            specs[1],
            args.alternate,
            args.timeout,
            lambda text: progress.stage(specs[0], text),
        )
    table = versus_table(
        *(specs[0], first, specs[1], second), environment.conditions_on(specs[0].device)
    )
    _write(args.out, [table])
    tables = {"versus": table, "rounds": rounds_table(first, second)}
    run = Run(new_run_id(specs[0]), specs[0], environment, created=now(), tables=tables)
    saved = store.save(run)
    print_table(table)
    print(f"saved {saved}")
    return 0


def _write(paths: Sequence[Path], tables: list[Table]) -> None:
    for path in paths:
        for index, table in enumerate(tables):
            suffix = f".{table.title.replace(' ', '-')}{path.suffix}" if index else path.suffix
            write_table(table, path.with_suffix(suffix))


def _batch(word: str) -> int | str:
    if word != AUTO and not word.isdigit():
        raise argparse.ArgumentTypeError(f"a number or auto, not {word!r}")
    return AUTO if word == AUTO else int(word)


COMMAND = Command(_flags, _run)
