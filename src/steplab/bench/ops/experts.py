"""Which cells of the routed experts are measured. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from steplab.bench.op_bench import OpBench, check_impls, check_least
from steplab.core import RunSpec
from steplab.core.errors import UserError
from steplab.costs import op_flops

Activation = Literal["gelu", "swiglu"]
Routing = Literal["balanced", "skewed", "collapsed"]
MATRICES = {"gelu": 2, "swiglu": 3}


def _flops(config: Mapping[str, Any]) -> tuple[float, float]:
    rows = config["tokens"] * config["top_k"]
    one = op_flops.matmul(rows, config["inner"], config["width"])
    forward = MATRICES[config["activation"]] * one
    return forward, 2 * forward


OP = OpBench(
    name="experts",
    shape=("tokens", "width", "inner", "experts", "top_k", "activation", "routing", "dtype"),
    ways=("impl",),
    results=("out", "dx", "dweights", "dw_in", "dw_out"),
    flops=_flops,
    flops_note="2 matrices per expert (swiglu: 3) over tokens x top-k rows, twice that backward; "
    "dropped rows are counted, so a row that drops some shows too much",
    x_axis="tokens",
)


@dataclass(frozen=True)
class Grid:
    """The values of every axis; the cells are all combinations."""

    tokens: Sequence[int]
    widths: Sequence[int]
    inners: Sequence[int]
    experts: Sequence[int]
    top_ks: Sequence[int]
    activations: Sequence[str]
    routings: Sequence[str]
    dtypes: Sequence[str]
    impls: Sequence[str]

    def __post_init__(self) -> None:
        axes = {"tokens": self.tokens, "width": self.widths, "inner": self.inners}
        check_least({**axes, "experts": self.experts, "top-k": self.top_ks}, {})
        if max(self.top_ks) > min(self.experts):
            raise UserError(
                f"A token cannot choose {max(self.top_ks)} of {min(self.experts)} experts.",
                "Lower --top-k or raise --experts.",
            )
        check_impls("experts", self.impls)


def plan(grid: Grid, template: RunSpec, seconds: float) -> list[RunSpec]:
    """Return one spec per cell, shapes outermost; `template` has what is the same in all."""
    axes = {
        "dtype": grid.dtypes,
        "activation": grid.activations,
        "width": grid.widths,
        "inner": grid.inners,
        "experts": grid.experts,
        "top_k": grid.top_ks,
        "tokens": grid.tokens,
        "routing": grid.routings,
        "impl": tuple(dict.fromkeys(grid.impls)),
    }
    specs = []
    for values in itertools.product(*axes.values()):
        config = {**dict(zip(axes, values, strict=True)), "seconds": seconds}
        size = f"T{config['tokens']} {config['routing']} {config['dtype']} {config['impl']}"
        specs.append(RunSpec(**{**vars(template), "config": config, "size": size, "batch": 1}))
    return specs
