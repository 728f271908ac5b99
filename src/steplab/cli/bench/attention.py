"""Time attention: shapes x implementations x tiles, with errors."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from steplab.bench.ops.attention import OP, Grid, plan
from steplab.cli.command import Command
from steplab.cli.op_bench import add_op_flags, run_bench
from steplab.core import RunSpec
from steplab.kernels.dispatch import impls

# The flagship's attention on a GPU; on a CPU what ends within a minute on two cores.
DEFAULTS: dict[str, dict[str, list[Any]]] = {
    "cuda": {
        "batch": [16],
        "heads": [12],
        "context": [4096],
        "head_width": [64, 128],
        "dtype": ["bf16"],
        "impl": ["triton_flash", "cudnn", "flash", "efficient", "flex", "compiled-reference"],
    },
    "cpu": {
        "batch": [1],
        "heads": [4],
        "context": [128, 512],
        "head_width": [64],
        "dtype": ["fp32"],
        "impl": ["flash", "math", "tiled", "reference", "compiled-reference"],
    },
}


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    add = parser.add_argument
    add("--batch", nargs="+", type=int, default=None, help="sequences; none: by the device")
    add("--heads", nargs="+", type=int, default=None, help="heads; none: by the device")
    add("--context", nargs="+", type=int, default=None, help="positions; none: by the device")
    add("--head-width", nargs="+", type=int, default=None, help="none: by the device")
    add("--causal", action=argparse.BooleanOptionalAction, default=True,
        help="a query sees no later key")  # fmt: skip
    about = "compiled-NAME: under torch.compile; flex: torch's FlexAttention; none: by the device"
    add("--impl", nargs="+", default=None, help=f"{', '.join(impls('attention'))}; {about}")
    add("--tiles", nargs="+", default=[], metavar="TILE",
        help="of triton_flash beside its own: rows x columns x warps x stages, as in 128x64x4x3, "
        "or all: the usual ones")  # fmt: skip
    add_op_flags(parser)


def _run(args: argparse.Namespace) -> int:
    return run_bench(args, OP, _specs)


def _specs(args: argparse.Namespace, template: RunSpec) -> list[RunSpec]:
    default = DEFAULTS[template.device]
    chosen = {name: getattr(args, name) or values for name, values in default.items()}
    grid = Grid(
        batches=chosen["batch"],
        heads=chosen["heads"],
        contexts=chosen["context"],
        head_widths=chosen["head_width"],
        dtypes=chosen["dtype"],
        causal=args.causal,
        impls=chosen["impl"],
        tiles=args.tiles,
    )
    return plan(grid, template, args.seconds)


COMMAND = Command(_flags, _run)
