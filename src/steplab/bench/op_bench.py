"""OpBench: the declaration of an op benchmark, from which its flags, cells and tables are made.

A file in `bench/ops/` that defines `BENCH` is a command, `steplab bench NAME`. A cell is a RunSpec
whose workload is the name of the benchmark and whose config holds one value of every axis.

No torch, neither here nor at the top of a file in `bench/ops/`: flags and cells are made by the
command line, which starts without it. What needs torch imports it inside functions that run in the
worker.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from steplab.core import Run, RunSpec, Table
from steplab.core.errors import UserError, did_you_mean
from steplab.kernels.dispatch import impls

if TYPE_CHECKING:
    import torch

    from steplab.bench.op_cell import OpInstance

COMPILED = "compiled-"  # before the name of an implementation: that one under torch.compile
Dtype = Literal["fp32", "tf32", "bf16", "fp16"]
Objective = Literal["forward", "backward", "both", "memory"]
Config = Mapping[str, Any]  # one value of every axis


@dataclass(frozen=True)
class OpAxis:
    """One axis of an op's config: the flag `--name`, which takes one or more values."""

    name: str
    help: str
    gpu: Sequence[Any]  # default values on a GPU: the flagship's shapes
    cpu: Sequence[Any]  # and on a CPU: what two cores finish within a minute
    kind: Any = int  # int, bool, str or a Literal
    minimum: int = 1  # of an int
    is_shape: bool = True  # cells that agree in every axis of the shape compute the same thing
    always: Sequence[Any] = ()  # values that are measured beside those asked for

    @property
    def flag(self) -> str:
        """The flag that sets the values of this axis."""
        return f"--{self.name.replace('_', '-')}"

    def values(self, asked: Sequence[Any] | None, device: str) -> list[Any]:
        """Return the values to measure: those asked for, or the defaults of the device."""
        chosen = asked or (self.gpu if device == "cuda" else self.cpu)
        if self.kind is int and min(chosen) < self.minimum:
            raise UserError(f"{self.flag} must be at least {self.minimum}, not {min(chosen)}.")
        return list(dict.fromkeys([*self.always, *chosen]))


def dtype_axis(gpu: Sequence[Dtype] = ("bf16",), cpu: Sequence[Dtype] = ("fp32",)) -> OpAxis:
    """Return the axis of the inputs' dtype."""
    return OpAxis("dtype", "dtype of the inputs: fp32, tf32, bf16 or fp16", gpu, cpu, Dtype)


def impl_axis(gpu: Sequence[str], cpu: Sequence[str], more: str = "") -> OpAxis:
    """Return the axis of the implementation; `more` is added to its help."""
    about = f"{COMPILED}NAME runs one under torch.compile{more}"
    return OpAxis("impl", about, gpu, cpu, str, is_shape=False)


def accept_all(values: Mapping[str, Sequence[Any]]) -> None:
    """Refuse no combination of values."""


def one_cell(config: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Return the combination itself: one cell for each."""
    return (config,)


def no_tables(runs: Sequence[Run]) -> Sequence[Table]:
    """Return no further tables."""
    return ()


@dataclass(frozen=True)
class OpBench:
    """An op benchmark: its axes, its arithmetic, and how one cell of it is built."""

    name: str
    kernel: str  # the op's folder in `kernels/`, whose implementations can be asked for
    axes: tuple[OpAxis, ...]  # in the order in which tables show them
    build: Callable[[Config, int, torch.device], OpInstance]  # config, seed, device
    size: str  # format of a short name for one cell, from its config
    results: tuple[str, ...]  # output and gradients, as the check against fp64 names them
    flops: Callable[[Config], tuple[float, float]]  # of forward and backward
    flops_note: str  # how they are counted, in words
    x_axis: str  # the axis of the shape along which a chart is drawn
    peers: tuple[str, ...] = ()  # what else `--impl` takes: implementations of other libraries
    check: Callable[[Mapping[str, Sequence[Any]]], None] = accept_all  # raises a UserError
    expand: Callable[[dict[str, Any]], Iterable[dict[str, Any]]] = one_cell  # one combination
    more_tables: Callable[[Sequence[Run]], Sequence[Table]] = no_tables

    @property
    def shape(self) -> tuple[str, ...]:
        """The axes of the shape."""
        return tuple(axis.name for axis in self.axes if axis.is_shape)

    @property
    def variant(self) -> tuple[str, ...]:
        """The axes in which cells of one shape differ: the implementation, its tiles."""
        return tuple(axis.name for axis in self.axes if not axis.is_shape)

    @property
    def impls(self) -> list[str]:
        """What `--impl` takes: implementations of the op, and those of other libraries."""
        return [*impls(self.kernel), *self.peers]

    def cells(
        self, asked: Mapping[str, Sequence[Any]], template: RunSpec, seconds: float
    ) -> list[RunSpec]:
        """Return one spec per combination of values, dtypes outermost.

        `asked` has the values by axis; an axis that is not in it takes the defaults of the
        template's device. `template` holds what all cells share; `seconds` limits each cell.
        """
        values = {a.name: a.values(asked.get(a.name), template.device) for a in self.axes}
        self._check_impls(values["impl"])
        self.check(values)
        order = sorted(values, key=lambda name: name != "dtype")
        combinations = itertools.product(*(values[name] for name in order))
        specs = []
        for combination in combinations:
            chosen = dict(zip(order, combination, strict=True))
            for config in self.expand({name: chosen[name] for name in values}):
                size = self.size.format(**config).strip()
                cell = {**config, "seconds": seconds}
                batch = config.get("batch", 1)
                specs.append(replace(template, config=cell, size=size, batch=batch))
        return specs

    def shape_text(self, config: Config, axes: Sequence[str] | None = None) -> str:
        """Return the shape of a cell in words, `batch 16, context 4,096, bf16`, or some axes."""
        chosen = self.shape if axes is None else axes
        return ", ".join(_words(name, config[name]) for name in chosen)

    def variant_text(self, config: Config) -> str:
        """Return how a cell computes: `triton_flash 128x64x4x3`."""
        return " ".join(str(config[name]) for name in self.variant if config[name])

    def _check_impls(self, asked: Sequence[str]) -> None:
        for name in asked:
            bare = name.removeprefix(COMPILED)
            if bare not in self.impls:
                message = f"{self.kernel} has no implementation {bare!r}."
                raise UserError(message, did_you_mean(bare, self.impls))


def _words(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else f"not {name}"
    if isinstance(value, str):
        return value
    return f"{name.replace('_', ' ')} {value:,}"
