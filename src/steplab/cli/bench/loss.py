"""Time head and loss: shapes x implementations, with errors."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

from steplab.bench.ops.loss import OP, Grid, Reduction, Weight, plan
from steplab.cli.command import Command
from steplab.cli.op_bench import add_op_flags, run_bench
from steplab.core import RunSpec
from steplab.core.codec import read_word

# GPT-2's head on a GPU; on a CPU what ends within a minute on two cores.
DEFAULTS: dict[str, dict[str, list[Any]]] = {
    "cuda": {
        "tokens": [16384],
        "width": [768],
        "vocabulary": [50257],
        "dtype": ["bf16"],
        "impl": ["compiled-reference", "reference", "chunked", "triton_chunked", "triton_lean"],
    },
    "cpu": {
        "tokens": [1024],
        "width": [64],
        "vocabulary": [8001],
        "dtype": ["fp32"],
        "impl": ["compiled-reference", "reference", "chunked"],
    },
}


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    add = parser.add_argument
    add("--tokens", nargs="+", type=int, default=None, help="none: by the device")
    add("--width", nargs="+", type=int, default=None, help="of a token; none: by the device")
    add("--vocabulary", nargs="+", type=int, default=None, help="words; none: by the device")
    reduction = partial(read_word, Reduction, where="--reduction")
    add("--reduction", nargs="+", type=reduction, default=["mean"], metavar="mean|none",
        help="one loss, or one for every token")  # fmt: skip
    weight = partial(read_word, Weight, where="--weight")
    add("--weight", nargs="+", type=weight, default=["same"], metavar="same|fp32",
        help="dtype of the head: that of the inputs, or fp32 as under autocast")  # fmt: skip
    add("--impl", nargs="+", default=None, metavar="IMPL",
        help="compiled-NAME: under torch.compile; none: by the device")  # fmt: skip
    add_op_flags(parser)


def _run(args: argparse.Namespace) -> int:
    return run_bench(args, OP, _specs)


def _specs(args: argparse.Namespace, template: RunSpec) -> list[RunSpec]:
    default = DEFAULTS[template.device]
    chosen = {name: getattr(args, name) or values for name, values in default.items()}
    grid = Grid(
        tokens=chosen["tokens"],
        widths=chosen["width"],
        vocabularies=chosen["vocabulary"],
        reductions=args.reduction,
        dtypes=chosen["dtype"],
        weights=args.weight,
        impls=chosen["impl"],
    )
    return plan(grid, template, args.seconds)


COMMAND = Command(_flags, _run)
