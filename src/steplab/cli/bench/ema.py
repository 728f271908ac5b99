"""Time the ComplexEMA: lengths x implementations, with errors and bounds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from steplab.bench.ops.ema import OP, Grid, bound_table, plan
from steplab.cli.command import Command
from steplab.cli.op_bench import add_op_flags, run_bench
from steplab.core import Run, RunSpec, fingerprint
from steplab.kernels.dispatch import impls
from steplab.report.terminal import print_table
from steplab.store import Store

# mega200m's layer on a GPU; on a CPU what ends within a minute on two cores.
DEFAULTS: dict[str, dict[str, list[Any]]] = {
    "cuda": {
        "batch": [4],
        "context": [1024, 4096, 16384],
        "width": [1024],
        "modes": [16],
        "dtype": ["bf16", "fp32"],
        "impl": ["scan", "fft", "fft_table"],
    },
    "cpu": {
        "batch": [1],
        "context": [128, 512],
        "width": [64],
        "modes": [8],
        "dtype": ["fp32"],
        "impl": ["fft", "fft_table", "sequential"],
    },
}


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    add = parser.add_argument
    add("--batch", nargs="+", type=int, default=None, help="sequences; none: by the device")
    add("--context", nargs="+", type=int, default=None, help="steps of time; none: by the device")
    add("--width", nargs="+", type=int, default=None, help="channels; none: by the device")
    add("--modes", nargs="+", type=int, default=None, help="complex averages per channel")
    about = "compiled-NAME: under torch.compile; none: by the device"
    add("--impl", nargs="+", default=None, help=f"{', '.join(impls('ema'))}; {about}")
    add_op_flags(parser)


def _run(args: argparse.Namespace) -> int:
    planned: list[RunSpec] = []

    def specs(args: argparse.Namespace, template: RunSpec) -> list[RunSpec]:
        planned[:] = _specs(args, template)
        return planned

    code = run_bench(args, OP, specs)
    bound = bound_table(_newest(Store(args.store), planned))
    if bound is not None:
        print_table(bound)
    return code


def _specs(args: argparse.Namespace, template: RunSpec) -> list[RunSpec]:
    default = DEFAULTS[template.device]
    chosen = {name: getattr(args, name) or values for name, values in default.items()}
    grid = Grid(
        batches=chosen["batch"],
        contexts=chosen["context"],
        widths=chosen["width"],
        modes=chosen["modes"],
        dtypes=chosen["dtype"],
        impls=chosen["impl"],
    )
    return plan(grid, template, args.seconds)


def _newest(store: Store, specs: Sequence[RunSpec]) -> list[Run]:
    """Return the newest Run of each cell, in the order of the cells."""
    runs = [run for _, run in store.all() if isinstance(run, Run)]
    found = {fingerprint(run.spec): run for run in sorted(runs, key=lambda run: run.created)}
    return [found[fingerprint(spec)] for spec in specs]


COMMAND = Command(_flags, _run)
