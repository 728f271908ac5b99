"""Where a step's work comes from: by phase, module, source line, operator; its copies by line."""

from __future__ import annotations

from typing import Literal

import numpy as np

from steplab.core import Cell, Column, Table
from steplab.core.units import fold_layer_numbers
from steplab.trace.analysis import Analysis, Floats

View = Literal["phase", "module", "line", "op", "copies"]
COPIES = ("copy", "memset")  # categories
MAX_ROWS = 20  # the rest is one row
PHASES = ("forward", "backward")  # with columns of their own
NOTES = {
    "phase": "of the phase that launched the work, however late it ran",
    "module": "of the innermost module; layers are summed, * stands for their numbers; backward "
    "counts for the module whose forward it belongs to",
    "line": "the innermost line outside torch, of forward and backward together",
    "op": "the innermost operator around each launch",
    "copies": "copies, casts and fills by the innermost line outside torch",
}


def work_table(analysis: Analysis, view: View) -> Table:
    """Return the mean step's kernels (operators without a GPU) by their origin, longest first.

    The rows add up to the last one. Kernels that run side by side count each, so that the sum may
    exceed the step.
    """
    work, steps = analysis.work, max(len(analysis.windows), 1)
    chosen = work.step >= 0
    if view == "copies":
        copies = [code for code, label in enumerate(work.labels) if label in COPIES]
        chosen = chosen & np.isin(work.category, copies)
    origin = (work.line if view == "copies" else getattr(work, view))[chosen]
    phase, ms = work.phase[chosen], work.duration[chosen] / 1e6 / steps
    size = len(work.labels)
    parts = [ms]
    for name in PHASES:
        code = work.labels.index(name) if name in work.labels else -1
        parts.append(np.where(phase == code, ms, 0.0))
    parts.append(np.full(len(ms), 1 / steps))  # how often
    sums: list[Floats] = [np.bincount(origin, part, size).astype(np.float64) for part in parts]
    groups: dict[str, list[float]] = {}
    for code in np.unique(origin).tolist():
        label = work.labels[code]
        own = [float(column[code]) for column in sums]
        label = fold_layer_numbers(label) if view == "module" else label
        groups[label] = _sum([groups[label], own]) if label in groups else own
    ranked = sorted(groups.items(), key=lambda item: -item[1][0])
    shown, rest = ranked[:MAX_ROWS], ranked[MAX_ROWS:]
    if rest:
        shown.append((f"({len(rest)} others)", _sum([own for _, own in rest])))
    whole = _sum([own for _, own in shown]) if shown else [0.0] * len(sums)
    rows = [_row(name, own, whole[0]) for name, own in [*shown, ("all", whole)]]
    what = "kernels" if analysis.budget.on_device else "operators"
    count = "launches" if analysis.budget.on_device else "calls"
    columns = (
        Column("source line" if view == "copies" else view),
        Column("time", "ms"),
        Column("share", "%", 3),
        *(Column(phase, "ms") for phase in PHASES),
        Column(count),
    )
    title = "copies and fills by line" if view == "copies" else f"time of the {what} by {view}"
    table = Table(f"{title}, mean step", columns, tuple(rows), NOTES[view])
    return table.only([0, 1, 2, len(columns) - 1]) if view == "phase" else table


def _sum(groups: list[list[float]]) -> list[float]:
    return [sum(values) for values in zip(*groups, strict=True)]


def _row(name: str, sums: list[float], whole: float) -> tuple[Cell, ...]:
    ms, *phases, launches = sums
    return (name, ms, 100 * ms / whole if whole else 0.0, *phases, launches)
