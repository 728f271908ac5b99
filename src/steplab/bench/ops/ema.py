"""The ComplexEMA benchmark: its cells, and the bound that memory bandwidth sets. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steplab.bench.op_bench import OpBench, check_impls, check_least, variant_text
from steplab.bench.op_results import cell_result
from steplab.core import Cell, Column, Run, RunSpec, Table
from steplab.hardware.catalog import find_card

# Multiply-adds per channel, mode and step of the recurrence: the complex step and its read-out;
# then the reversed one with two sums. A Fourier path does others; all rows are counted alike.
FORWARD, BACKWARD = 6, 14
ITEM_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}


def elements(config: Mapping[str, Any]) -> int:
    """Return the elements of the input."""
    return int(config["batch"] * config["context"] * config["width"])


def _flops(config: Mapping[str, Any]) -> tuple[float, float]:
    pairs = elements(config) * config["modes"]
    return 2.0 * FORWARD * pairs, 2.0 * BACKWARD * pairs


def bytes_moved(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the bytes of forward and backward with every large tensor touched once.

    Forward: x and y. Backward: x, dy and dx. Parameters and states are small beside them.
    """
    one = elements(config) * ITEM_BYTES[config["dtype"]]
    return 2 * one, 3 * one


OP = OpBench(
    name="ema",
    shape=("batch", "context", "width", "modes", "dtype"),
    ways=("impl",),
    results=("out", "dx", "dalpha", "ddelta", "dtheta", "dgamma", "domega"),
    flops=_flops,
    flops_note=f"{FORWARD} multiply-adds forward and {BACKWARD} backward per element and mode, "
    "those of the recurrence, for every row alike",
    x_axis="context",
)


@dataclass(frozen=True)
class Grid:
    """The values of every axis; the cells are all combinations."""

    batches: Sequence[int]
    contexts: Sequence[int]
    widths: Sequence[int]
    modes: Sequence[int]
    dtypes: Sequence[str]
    impls: Sequence[str]

    def __post_init__(self) -> None:
        axes = {"batch": self.batches, "context": self.contexts, "width": self.widths}
        check_least({**axes, "modes": self.modes}, {})
        check_impls("ema", self.impls)


def plan(grid: Grid, template: RunSpec, seconds: float) -> list[RunSpec]:
    """Return one spec per cell, shapes outermost; `template` has what is the same in all."""
    axes = {
        "dtype": grid.dtypes,
        "modes": grid.modes,
        "width": grid.widths,
        "batch": grid.batches,
        "context": grid.contexts,
        "impl": tuple(dict.fromkeys(grid.impls)),
    }
    specs = []
    for values in itertools.product(*axes.values()):
        config: dict[str, Any] = {**dict(zip(axes, values, strict=True)), "seconds": seconds}
        size = f"L{config['context']} N{config['modes']} {config['dtype']} {config['impl']}"
        fields = {**vars(template), "config": config, "size": size, "batch": config["batch"]}
        specs.append(RunSpec(**fields))
    return specs


COLUMNS = (
    *(Column("context"), Column("dtype"), Column("impl")),
    *(Column("forward", "ms"), Column("bound", "ms"), Column("share", "%", 3)),
    *(Column("backward", "ms"), Column("bound", "ms"), Column("share", "%", 3)),
)


def bound_table(runs: Sequence[Run]) -> Table | None:
    """Return the table; None where the memory's bandwidth is not known."""
    card = find_card(runs[0].environment.device_name) if runs[0].spec.device == "cuda" else None
    if card is None:
        return None
    rows: list[tuple[Cell, ...]] = []
    for run in runs:
        if run.status != "ok":
            continue
        config, found = run.spec.config, cell_result(run)
        row: list[Cell] = [config["context"], config["dtype"], variant_text(OP, config)]
        times = (found.forward_ms, found.backward_ms)
        for size, ms in zip(bytes_moved(config), times, strict=True):
            least = size / card.bandwidth_gbs / 1e6
            row += [ms, least, 100 * least / ms if ms else None]
        rows.append(tuple(row))
    told = (
        f"bound: x and y once forward, x, dy and dx once backward, at {card.bandwidth_gbs:,.0f} "
        "GB/s by the datasheet"
    )
    return Table("share of the memory bound", COLUMNS, tuple(rows), told)
