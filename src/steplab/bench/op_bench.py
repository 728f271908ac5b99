"""OpBench: the declaration of an op benchmark, from which cells, flags and tables are made. No torch.

A cell is a RunSpec whose workload is the op's name and whose config holds the axes of the shape and
of the variant (implementation, tiles)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from steplab.core.errors import UserError, did_you_mean
from steplab.kernels.dispatch import impls

COMPILED = "compiled-"  # before the name of an implementation: that one under torch.compile
Dtype = Literal["fp32", "tf32", "bf16", "fp16"]
Objective = Literal["forward", "backward", "both", "memory"]


@dataclass(frozen=True)
class OpBench:
    """The axes of an op's config, and its arithmetic."""

    name: str
    shape: tuple[str, ...]  # cells that agree in these compute the same thing
    ways: tuple[str, ...]  # and differ in these: implementation, tiles
    results: tuple[str, ...]  # output and gradients, as the check names them
    flops: Callable[[Mapping[str, Any]], tuple[float, float]]  # config -> forward, backward
    flops_note: str  # in words
    x_axis: str  # the axis of `shape` that a chart runs along


def check_impls(op: str, asked: Sequence[str], more: tuple[str, ...] = ()) -> None:
    """Refuse a name that is no implementation of `op`, nor one of `more`."""
    known = [*impls(op), *more]
    for name in asked:
        bare = name.removeprefix(COMPILED)
        if bare not in known:
            raise UserError(f"{op} has no implementation {bare!r}.", did_you_mean(bare, known))


def check_least(axes: Mapping[str, Sequence[int]], least: Mapping[str, int]) -> None:
    """Refuse an axis with a value below `least` of it, which is 1 unless named."""
    for name, values in axes.items():
        limit = least.get(name, 1)
        if min(values) < limit:
            raise UserError(f"--{name} must be at least {limit}, not {min(values)}.")


def shape_text(op: OpBench, config: Mapping[str, Any], axes: Sequence[str] | None = None) -> str:
    """Return the shape of a cell in words, `batch 16, context 4,096, bf16`, or some axes of it."""
    chosen = op.shape if axes is None else axes
    return ", ".join(_words(name, config[name]) for name in chosen)


def variant_text(op: OpBench, config: Mapping[str, Any]) -> str:
    """Return how a cell computes: `triton_flash 128x64x4x3`."""
    return " ".join(str(config[name]) for name in op.ways if config[name])


def _words(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else f"not {name}"
    if isinstance(value, str):
        return value
    return f"{name.replace('_', ' ')} {value:,}"
