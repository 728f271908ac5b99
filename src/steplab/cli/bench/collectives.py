"""Time all-reduce, all-gather, reduce-scatter and all-to-all."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from steplab.bench.collectives.job import OPS, CollectiveOp, Dtype
from steplab.bench.collectives.sweep import Grid, collectives_table, plan, sweep
from steplab.cli.command import Command
from steplab.core import Environment, Run, units
from steplab.core.codec import read_word
from steplab.core.errors import MeasurementError, Unsupported, no_gpu
from steplab.report.export import check_suffixes, write_table
from steplab.report.terminal import print_table
from steplab.store import DEFAULT_ROOT, Store


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    add = parser.add_argument
    add("--op", nargs="+", type=_one_of(CollectiveOp, "--op"), default=list(OPS), metavar="OP",
        help=f"any of {', '.join(OPS)}")  # fmt: skip
    add("--mib", nargs="+", type=float, default=[1.0, 10.0, 100.0], help="full messages in MiB")
    add("--world", nargs="+", type=int, default=argparse.SUPPRESS,
        help="numbers of ranks (default: 2; 4 too where there are 4 cores or GPUs)")  # fmt: skip
    add("--runs", type=int, default=10, help="timed operations per cell")
    add("--warmup", type=int, default=2, help="untimed operations before them")
    add("--dtype", type=_one_of(Dtype, "--dtype"), default="fp32", help="fp32 or bf16")
    add("--device", type=_one_of(Literal["auto", "cpu", "cuda"], "--device"), default="auto",
        help="cpu (gloo), cuda (NCCL), or auto: cuda from 2 GPUs on")  # fmt: skip
    add("--timeout", type=float, default=600.0, help="seconds that one world size may take")
    add("--store", type=Path, default=DEFAULT_ROOT, help="folder of the Runs")
    add("--out", nargs="+", type=Path, default=[], help="also write .csv, .md, .json or .svg")


def _run(args: argparse.Namespace) -> int:
    check_suffixes(args.out)
    store = Store(args.store)
    store.check_writable()
    from steplab.probes.environment import capture_environment

    environment = capture_environment()
    grid = _grid(args, environment)
    total = len(plan(grid))
    runs: list[Run] = []
    try:
        for run in sweep(grid, store, environment, sys.argv):
            runs.append(run)
            print(f"[{len(runs)}/{total}] {_line(run)}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        told = f"{len(runs)} of {total} cells are in {store.root}"
        print(f"{told}; the same command goes on from there.", file=sys.stderr)
        raise
    table = collectives_table(runs)
    for path in args.out:
        write_table(table, path)
    print_table(table)
    print(f"{units.counted(total, 'Run')} in {store.root}; list them with: steplab runs")
    _refuse_nothing(runs)
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


def _line(run: Run) -> str:
    config = run.spec.config
    seen = units.milliseconds(run.clock.step.median) if run.clock else run.reason
    where = f"{config['op']} of {config['mib']:g} MiB, {config['world']} ranks"
    return f"{where}: {run.status}, {seen}"


def _refuse_nothing(runs: Sequence[Run]) -> None:
    """Raise when no row holds a number."""
    statuses = {run.status for run in runs}
    if statuses == {"unsupported"}:
        raise Unsupported(f"No collective can be measured here: {runs[0].reason}.")
    if "ok" not in statuses:
        reason = runs[0].reason.rstrip(".")
        raise MeasurementError(f"No collective could be measured; the first: {reason}.")


def _one_of(kind: Any, flag: str) -> Callable[[str], Any]:
    return lambda word: read_word(kind, word, flag)


COMMAND = Command(_flags, _run)
