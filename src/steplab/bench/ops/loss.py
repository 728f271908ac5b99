"""Which cells of the loss are measured. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from steplab.bench.op_bench import COMPILED, OpBench, check_impls, check_least
from steplab.core import RunSpec
from steplab.costs import op_flops

KERNEL = "cross_entropy"  # the op's folder among the kernels
Reduction = Literal["mean", "none"]
Weight = Literal["same", "fp32"]
WHOLE = "reference"  # the implementation that holds all logits
LEAN = "triton_lean"  # the one that computes them twice for a mean, too
WEIGHT_IN = "weight in "  # before the dtype of the weight: the words of that axis


def _flops(config: Mapping[str, Any]) -> tuple[float, float]:
    product = op_flops.matmul(config["tokens"], config["vocabulary"], config["width"])
    impl = config["impl"].removeprefix(COMPILED)
    if impl == WHOLE:
        return product, 2 * product
    at_once = config["reduction"] == "mean" and impl != LEAN
    return (3 * product, 0.0) if at_once else (product, 3 * product)


OP = OpBench(
    name="loss",
    shape=("tokens", "width", "vocabulary", "reduction", "dtype", "weight"),
    ways=("impl",),
    results=("out", "dx", "dweight"),
    flops=_flops,
    flops_note="a product of tokens x vocabulary x width forward and two backward; in chunks all "
    "three in the forward of a mean, or three in the backward, which computes the logits again",
    x_axis="tokens",
)


@dataclass(frozen=True)
class Grid:
    """The values of every axis; the cells are all combinations."""

    tokens: Sequence[int]
    widths: Sequence[int]
    vocabularies: Sequence[int]
    reductions: Sequence[str]
    dtypes: Sequence[str]
    weights: Sequence[str]  # "same" as the inputs, or "fp32" beside 16-bit inputs
    impls: Sequence[str]

    def __post_init__(self) -> None:
        axes = {"tokens": self.tokens, "width": self.widths, "vocabulary": self.vocabularies}
        check_least(axes, {"vocabulary": 2})  # of one word the loss is 0, and so is every gradient
        check_impls(KERNEL, self.impls)


def plan(grid: Grid, template: RunSpec, seconds: float) -> list[RunSpec]:
    """Return one spec per cell, shapes outermost; `template` has what is the same in all."""
    specs = []
    shapes = itertools.product(
        grid.dtypes, grid.weights, grid.reductions, grid.widths, grid.vocabularies, grid.tokens
    )
    for dtype, weight, reduction, width, vocabulary, tokens in shapes:
        for impl in dict.fromkeys(grid.impls):
            shape = {"tokens": tokens, "width": width, "vocabulary": vocabulary}
            of_weight = WEIGHT_IN + (dtype if weight == "same" else "fp32")
            how = {"reduction": reduction, "dtype": dtype, "weight": of_weight, "impl": impl}
            config: dict[str, Any] = {**shape, **how, "seconds": seconds}
            size = f"T{tokens} D{width} V{vocabulary} {reduction} {dtype} {impl}"
            specs.append(RunSpec(**{**vars(template), "config": config, "size": size, "batch": 1}))
    return specs
