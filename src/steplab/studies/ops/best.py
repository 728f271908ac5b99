"""Which way is best at each shape, and whether that is more than noise. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from steplab.compare.apart import LEAST_SAMPLES, apart_ratio
from steplab.record import Run
from steplab.record.table import Cell
from steplab.studies.ops.op import Objective, Op, way_text
from steplab.studies.ops.rows import samples_of, seen

MIB = 2**20


def by_shape(op: Op, runs: Sequence[Run]) -> list[list[Run]]:
    """Return the Runs that compute the same thing together, in the order of their first."""
    groups: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(run.spec.config[name] for name in op.shape), []).append(run)
    return list(groups.values())


def ranked(runs: Sequence[Run], objective: Objective) -> list[Run]:
    """Return the Runs that are right and have a number, the best first."""
    fit = [(seen(run).value(objective), run) for run in runs if run.status == "ok"]
    return [run for _, run in sorted(((v, r) for v, r in fit if v is not None), key=_value)]


def best_of(runs: Sequence[Run], objective: Objective) -> Run | None:
    """Return the best Run of one shape; None where none is right."""
    order = ranked(runs, objective)
    return order[0] if order else None


def mark_of(runs: Sequence[Run], objective: Objective) -> str:
    """Return `best`, or `best?` where the next one cannot be told from it."""
    order = ranked(runs, objective)
    unsure = len(order) > 1 and not _surety(order, objective)[0].isnumeric()
    return "best?" if unsure and objective != "memory" else "best"


def verdict(op: Op, runs: Sequence[Run], objective: Objective) -> tuple[Cell, ...]:
    """Return the best, its number, the next, next / best, and whether that is more than noise."""
    order = ranked(runs, objective)
    if not order:
        return "none", "", "", "", "no row is right"
    value = seen(order[0]).value(objective)
    number = value / MIB if value is not None and objective == "memory" else value
    name = way_text(op, order[0].spec.config)
    if len(order) == 1:
        return name, number, "", "", "no other row is right"
    other = seen(order[1]).value(objective)
    ratio = other / value if value and other is not None else None
    return name, number, way_text(op, order[1].spec.config), ratio, _surety(order, objective)


def _surety(order: Sequence[Run], objective: Objective) -> str:
    if objective == "memory":
        equal = seen(order[0]).extra_bytes == seen(order[1]).extra_bytes
        return "equal" if equal else "exact"
    one, two = (samples_of(run, objective).values for run in order[:2])
    if min(len(one), len(two)) < LEAST_SAMPLES:
        return f"cannot tell: fewer than {LEAST_SAMPLES} samples"
    interval = apart_ratio(two, one)
    told = f"{interval.low:.3f} to {interval.high:.3f}"
    return told if interval.excludes_one else f"cannot tell: {told}"


def _value(pair: tuple[float, Run]) -> float:
    return pair[0]
