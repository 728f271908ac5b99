"""Time all-reduce, all-gather, reduce-scatter and all-to-all."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from steplab.bench.collectives.job import OPS, CollectiveOp, Dtype
from steplab.bench.collectives.sweep import Grid, collectives_table, plan, sweep
from steplab.cli.command import Command
from steplab.cli.flags import add_device_flag, add_out_flag, add_store_flag
from steplab.cli.progress import CellProgress
from steplab.cli.sweeps import collect_runs, print_count, require_success
from steplab.core import Environment, RunSpec, units
from steplab.core.codec import read_word
from steplab.core.errors import Unsupported, no_gpu
from steplab.report.export import write_table
from steplab.report.terminal import print_table
from steplab.store import Store


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    add = parser.add_argument
    op = partial(read_word, CollectiveOp, where="--op")
    add("--op", nargs="+", type=op, default=list(OPS), metavar="OP", help="collectives to time")
    add("--mib", nargs="+", type=float, default=[1.0, 10.0, 100.0], help="message sizes in MiB")
    add("--world", nargs="+", type=int, default=argparse.SUPPRESS,
        help="numbers of ranks (default: 2, and 4 where there are 4 cores or GPUs)")  # fmt: skip
    add("--runs", type=int, default=10, help="timed operations per cell")
    add("--warmup", type=int, default=2, help="untimed operations before them")
    dtype = partial(read_word, Dtype, where="--dtype")
    add("--dtype", type=dtype, default="fp32", metavar="fp32|bf16", help="dtype of the message")
    add_device_flag(parser, "cpu (gloo), cuda (NCCL) or auto: cuda from 2 GPUs on")
    add("--timeout", type=float, default=600.0, help="seconds that one world size may take")
    add_store_flag(parser)
    add_out_flag(parser)


def _run(args: argparse.Namespace) -> int:
    store = Store(args.store)
    store.check_writable()
    from steplab.probes.environment import capture_environment

    environment = capture_environment()
    grid = _grid(args, environment)
    total = len(plan(grid))
    with CellProgress(total, _cell_name) as progress:
        cells = sweep(grid, store, environment, sys.argv, progress.stage)
        runs = collect_runs(cells, total, store, progress.done)
    table = collectives_table(runs)
    for path in args.out:
        write_table(table, path)
    print_table(table)
    print_count(runs, store)
    if {run.status for run in runs} == {"unsupported"}:
        raise Unsupported(f"No collective can be measured here: {runs[0].reason}.")
    require_success(runs, "No collective could be measured")
    return 0


def _grid(args: argparse.Namespace, environment: Environment) -> Grid:
    gpus = len(environment.accelerators)
    device = args.device
    if device == "auto":
        device = "cuda" if gpus > 1 else "cpu"
    if device == "cuda" and not gpus:
        raise no_gpu()
    places = gpus if device == "cuda" else environment.cores
    worlds = getattr(args, "world", [2, 4] if places >= 4 else [2])
    return Grid(
        ops=tuple(dict.fromkeys(args.op)),
        mibs=tuple(dict.fromkeys(args.mib)),
        worlds=tuple(dict.fromkeys(worlds)),
        device=device,
        dtype=args.dtype,
        runs=args.runs,
        warmup=args.warmup,
        timeout_s=args.timeout,
    )


def _cell_name(spec: RunSpec) -> str:
    config = spec.config
    ranks = units.counted(config["world"], "rank")
    return f"{config['op']} of {config['mib']:g} MiB, {ranks}"


COMMAND = Command(_flags, _run)
