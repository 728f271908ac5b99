"""What takes more or less time in B than in A: terms of the budget, kernels, modules, phases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from steplab.core import Budget, Cell, Clock, Column, Table
from steplab.core.units import fold_layer_numbers
from steplab.trace.analysis import UNATTRIBUTED, Analysis

MAX_ROWS = 15  # the rest is summed up in one row


@dataclass(frozen=True)
class Part:
    """Time and launches of one kernel, module or term in a mean step."""

    ms: float = 0.0
    launches: float = 0.0


Parts = Mapping[str, Part]
Cycles = Sequence[Analysis]  # of the same step: their steps are counted together


def budget_diff(a: Budget, b: Budget) -> Table:
    """Return the budgets of the mean steps: all rows but the last sum to the last."""
    pairs = _pairs(_budget_parts(a), _budget_parts(b))
    rows: list[tuple[Cell, ...]] = [
        (name, one.ms, other.ms, other.ms - one.ms) for name, one, other in pairs
    ]
    rows.append(("the whole step", *_sums(rows)))
    note = "mean of the profiled steps; every instant of a step is counted once"
    return Table("where the difference lies", _columns("part"), tuple(rows), note)


def kernel_diff(a: Cycles, b: Cycles, most: int = MAX_ROWS) -> Table | None:
    """Return the kernels that changed, the largest difference first (operators without a GPU).

    None where no kernel was launched in a step.
    """
    name = "kernels" if any(cycle.budget.on_device for cycle in (*a, *b)) else "operators"
    first, second = (_work_parts(side, "name", str) for side in (a, b))
    if not first and not second:
        return None
    note = f"time of the {name} of a mean step, summed over streams and threads"
    return _diff_table(f"{name} that changed", name[:-1], first, second, most, note)


def module_diff(a: Cycles, b: Cycles, most: int = MAX_ROWS) -> Table | None:
    """Return the modules that changed; layers that differ in their number only are one row.

    None where the traces of one side name no module: it was recorded without detail.
    """
    first, second = (_work_parts(side, "module", fold_layer_numbers) for side in (a, b))
    if not {*first} - {UNATTRIBUTED} or not {*second} - {UNATTRIBUTED}:
        return None
    note = "forward and backward together; layers are summed, * stands for their numbers"
    return _diff_table("modules that changed", "module", first, second, most, note)


def phase_diff(a: Clock, b: Clock) -> Table | None:
    """Return medians of the phases of steps without a profiler; None when none was timed."""
    sides = [
        {name: Part(samples.median) for name, samples in clock.phases.items() if samples.values}
        for clock in (a, b)
    ]
    if not any(sides):
        return None
    rows = [(name, one.ms, other.ms, other.ms - one.ms) for name, one, other in _pairs(*sides)]
    note = "medians of the stored steps without a profiler"
    return Table("phases that changed", _columns("phase"), tuple(rows), note)


def _columns(what: str) -> tuple[Column, ...]:
    return (Column(what), Column("A", "ms"), Column("B", "ms"), Column("difference", "ms"))


def _pairs(a: Parts, b: Parts) -> list[tuple[str, Part, Part]]:
    """Names with their parts in A and in B, the largest difference first."""
    pairs = [(name, a.get(name, Part()), b.get(name, Part())) for name in dict.fromkeys([*a, *b])]
    return sorted(pairs, key=lambda pair: -abs(pair[2].ms - pair[1].ms))


def _budget_parts(budget: Budget) -> dict[str, Part]:
    """Mean milliseconds per category, per term other than `kernels`, and of the residual."""
    count, kernels = len(budget.steps), budget.term_name("kernels")
    sums: dict[str, float] = {}
    for step in budget.steps:
        parts = [(f"{kernels}: {budget.term_name(c.name)}", c.ms) for c in step.categories]
        others = [(term, ms) for term, ms in step.terms.items() if term != "kernels" and ms]
        parts += [(budget.term_name(term), ms) for term, ms in others]
        uncategorized = step.terms.get("kernels", 0.0) - sum(c.ms for c in step.categories)
        parts += [(kernels, uncategorized)] if abs(uncategorized) > 1e-6 else []
        for name, ms in [*parts, ("residual", step.residual_ms)]:
            sums[name] = sums.get(name, 0.0) + ms
    # To a femtosecond, and no minus zero: a residual of nothing is 0.
    return {name: Part(round(ms / count, 12) + 0.0) for name, ms in sums.items()}


def _work_parts(cycles: Cycles, column: str, name_of: Callable[[str], str]) -> dict[str, Part]:
    """Sum the work of all steps by its label in `column`, then divide by the steps."""
    steps = sum(len(cycle.windows) for cycle in cycles)
    parts: dict[str, Part] = {}
    for work, windows in ((cycle.work, cycle.windows) for cycle in cycles):
        inside = np.isin(work.step, [window.number for window in windows])
        codes, size = getattr(work, column)[inside], len(work.labels)
        nanoseconds = np.bincount(codes, weights=work.duration[inside], minlength=size)
        launches = np.bincount(codes, minlength=size)
        for code in np.flatnonzero(launches):
            name = name_of(work.labels[code])
            before = parts.get(name, Part())
            ms = before.ms + float(nanoseconds[code]) / 1e6 / steps
            parts[name] = Part(ms, before.launches + float(launches[code]) / steps)
    return parts


def _diff_table(title: str, what: str, a: Parts, b: Parts, most: int, note: str) -> Table:
    pairs = _pairs(a, b)
    rows: list[tuple[Cell, ...]] = [_diff_row(*pair) for pair in pairs[:most]]
    if rest := [_diff_row(*pair) for pair in pairs[most:]]:
        rows.append((f"{len(rest)} others", *_sums(rest)))
    per_step = (Column("calls A", digits=3), Column("calls B", digits=3))
    return Table(title, (*_columns(what), *per_step), tuple(rows), note)


def _diff_row(name: str, one: Part, other: Part) -> tuple[Cell, ...]:
    return (name, one.ms, other.ms, other.ms - one.ms, one.launches, other.launches)


def _sums(rows: list[tuple[Cell, ...]]) -> tuple[Cell, ...]:
    """Sum every column but the first; rounded to a femtosecond, so that 0 is 0."""
    columns = list(zip(*rows, strict=True))[1:]
    return tuple(round(sum(float(cell or 0) for cell in column), 12) for column in columns)
