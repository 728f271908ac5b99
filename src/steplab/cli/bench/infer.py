"""Time forecasts: size x recipe x batch x horizon, with the cache and without."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from steplab.bench.infer import MODEL, ForecastTrials, Grid, infer_table, plan
from steplab.bench.sweep import sweep
from steplab.cli.command import Command
from steplab.cli.flags import add_device_flag, add_out_flag, add_store_flag, resolve_device
from steplab.cli.progress import CellProgress
from steplab.cli.step_flags import add_recipe_flag
from steplab.cli.sweeps import collect_runs, print_count, require_success
from steplab.core import RunSpec
from steplab.report.export import write_table
from steplab.report.terminal import print_table
from steplab.store import Store
from steplab.workloads.workload import find_workload


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    sizes = ", ".join(find_workload(MODEL).presets)
    add = parser.add_argument
    add("--size", nargs="+", default=[], help=f"presets: {sizes} (default depends on the device)")
    add("--batch", nargs="+", type=int, default=[1, 8, 64], help="series per call")
    add("--horizon", nargs="+", type=int, default=[1, 24, 96], help="points to forecast")
    add("--context", type=int, default=512, help="points of the past")
    add_recipe_flag(parser, many=True)
    add("--calls", type=int, default=30, help="timed calls per cell, with the cache and without")
    add("--warmup", type=int, default=3, help="untimed calls before them")
    add("--seed", type=int, default=42, help="seed of weights and series")
    add_device_flag(parser)
    add_store_flag(parser)
    add_out_flag(parser)


def _run(args: argparse.Namespace) -> int:
    _specs(args, "cpu")  # so that a typo is reported before torch is imported
    store = Store(args.store)
    store.check_writable()
    from steplab.probes.environment import capture_environment

    environment = capture_environment()
    specs = _specs(args, resolve_device(args.device, environment))
    with CellProgress(len(specs), _cell_name) as progress:
        cells = sweep(
            specs, store, ForecastTrials(), environment, sys.argv, progress.stage, progress.say
        )
        runs = collect_runs(cells, len(specs), store, progress.done)
    table = infer_table(runs)
    for path in args.out:
        write_table(table, path)
    print_table(table)
    print_count(runs, store)
    require_success(runs)
    return 0


def _specs(args: argparse.Namespace, device: str) -> list[RunSpec]:
    entry = find_workload(MODEL)
    grid = Grid(
        sizes=args.size or [entry.default_size(device)],
        batches=args.batch,
        horizons=args.horizon,
        context=args.context,
        recipes=args.recipe,
        device=device,
        calls=args.calls,
        warmup=args.warmup,
        seed=args.seed,
    )
    return plan(grid)


def _cell_name(spec: RunSpec) -> str:
    horizon = spec.config["horizon"]
    return f"{spec.size} [{spec.recipe.label}] batch {spec.batch} horizon {horizon}"


COMMAND = Command(_flags, _run)
