"""Time forecasts: size x recipe x batch x horizon, with the cache and without."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from steplab.bench.infer import MODEL, Grid, infer_table, plan, sweep
from steplab.cli.command import Command
from steplab.cli.flags import add_device_flag, add_out_flag, add_store_flag, resolve_device
from steplab.core import Run, RunSpec, units
from steplab.core.errors import MeasurementError
from steplab.report.export import write_table
from steplab.report.terminal import print_table
from steplab.store import Store
from steplab.techniques.recipes import parse_recipe
from steplab.workloads.workload import find_workload


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    sizes = ", ".join(find_workload(MODEL).presets)
    add = parser.add_argument
    add("--size", nargs="+", default=[], help=f"presets ({sizes}); none: by the device")
    add("--batch", nargs="+", type=int, default=[1, 8, 64], help="series per call")
    add("--horizon", nargs="+", type=int, default=[1, 24, 96], help="points to forecast")
    add("--context", type=int, default=512, help="points of the past")
    add("--recipe", nargs="+", default=["plain"], help="plain, precision=bf16, impl.experts=...")
    add("--calls", type=int, default=30, help="timed calls per cell and way")
    add("--warmup", type=int, default=3, help="untimed calls before them")
    add("--seed", type=int, default=42, help="of weights and series")
    add_device_flag(parser)
    add_store_flag(parser)
    add_out_flag(parser)


def _run(args: argparse.Namespace) -> int:
    _specs(args, "cpu")  # a slip of the pen is told before torch is imported
    store = Store(args.store)
    store.check_writable()
    from steplab.probes.environment import capture_environment

    environment = capture_environment()
    specs = _specs(args, resolve_device(args.device, environment))
    runs: list[Run] = []
    try:
        for run in sweep(specs, store, environment, sys.argv):
            runs.append(run)
            print(f"[{len(runs)}/{len(specs)}] {_line(run)}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        told = f"{len(runs)} of {len(specs)} cells are in {store.root}"
        print(f"{told}; the same command goes on from there.", file=sys.stderr)
        raise
    table = infer_table(runs)
    for path in args.out:
        write_table(table, path)
    print_table(table)
    print(f"{units.counted(len(runs), 'Run')} in {store.root}; list them with: steplab runs")
    if all(run.status != "ok" for run in runs):
        reason = runs[0].reason.rstrip(".")
        raise MeasurementError(f"No cell could be measured; the first: {reason}.")
    return 0


def _specs(args: argparse.Namespace, device: str) -> list[RunSpec]:
    entry = find_workload(MODEL)
    grid = Grid(
        sizes=args.size or [entry.gpu_preset if device == "cuda" else entry.cpu_preset],
        batches=args.batch,
        horizons=args.horizon,
        context=args.context,
        recipes=[parse_recipe(text) for text in args.recipe],
        device=device,
        calls=args.calls,
        warmup=args.warmup,
        seed=args.seed,
    )
    return plan(grid)


def _line(run: Run) -> str:
    spec, config = run.spec, run.spec.config
    where = f"{spec.size} [{spec.recipe.label}] batch {spec.batch} horizon {config['horizon']}"
    seen = units.milliseconds(run.clock.step.median) if run.clock else run.reason
    return f"{where}: {run.status}, {seen}"


COMMAND = Command(_flags, _run)
