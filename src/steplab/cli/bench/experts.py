"""Time routed experts: shapes x implementations x routings."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any, get_args

from steplab.bench.ops.experts import OP, Activation, Grid, Routing, plan
from steplab.cli.command import Command
from steplab.cli.op_bench import add_op_flags, run_bench
from steplab.core import RunSpec
from steplab.core.codec import read_word
from steplab.kernels.dispatch import impls

# The flagship's layer on a GPU; on a CPU what ends within a minute on two cores.
DEFAULTS: dict[str, dict[str, list[Any]]] = {
    "cuda": {
        "tokens": [65536],
        "width": [768],
        "inner": [3072],
        "dtype": ["bf16"],
        "impl": ["fused", "grouped", "capacity", "loop"],
    },
    "cpu": {
        "tokens": [1024],
        "width": [64],
        "inner": [256],
        "dtype": ["fp32"],
        "impl": ["grouped", "capacity", "loop"],
    },
}


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    add = parser.add_argument
    add("--tokens", nargs="+", type=int, default=None, help="none: by the device")
    add("--width", nargs="+", type=int, default=None, help="of a token; none: by the device")
    add("--inner", nargs="+", type=int, default=None, help="of an expert; none: by the device")
    add("--experts", nargs="+", type=int, default=[8], help="how many there are")
    add("--top-k", nargs="+", type=int, default=[2], help="how many a token goes to")
    routing = partial(read_word, Routing, where="--routing")
    add("--routing", nargs="+", type=routing, default=list(get_args(Routing)), metavar="ROUTING",
        help="balanced, skewed (1, 1/2, 1/3, ...) or collapsed (all to the first)")  # fmt: skip
    activation = partial(read_word, Activation, where="--activation")
    add("--activation", nargs="+", type=activation, default=["gelu"], metavar="gelu|swiglu",
        help="between an expert's matrices")  # fmt: skip
    about = "compiled-NAME: under torch.compile; none: by the device"
    add("--impl", nargs="+", default=None, help=f"{', '.join(impls('experts'))}; {about}")
    add_op_flags(parser)


def _run(args: argparse.Namespace) -> int:
    return run_bench(args, OP, _specs)


def _specs(args: argparse.Namespace, template: RunSpec) -> list[RunSpec]:
    default = DEFAULTS[template.device]
    chosen = {name: getattr(args, name) or values for name, values in default.items()}
    grid = Grid(
        tokens=chosen["tokens"],
        widths=chosen["width"],
        inners=chosen["inner"],
        experts=args.experts,
        top_ks=args.top_k,
        activations=args.activation,
        routings=args.routing,
        dtypes=chosen["dtype"],
        impls=chosen["impl"],
    )
    return plan(grid, template, args.seconds)


COMMAND = Command(_flags, _run)
