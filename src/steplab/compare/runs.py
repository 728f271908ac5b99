"""Two Runs or traces become one Comparison."""

from __future__ import annotations

from collections.abc import Sequence

from steplab.compare.alike import what_sets_apart
from steplab.compare.apart import apart_ratio
from steplab.compare.differences import differences_table
from steplab.compare.moved import budget_table, kernels_table, modules_table, phases_table
from steplab.compare.side_by_side import sides_table
from steplab.compare.sides import Side, check_side, comparable_samples
from steplab.compare.statistics import round_ratio
from steplab.compare.verdict import change_of, verdict_on
from steplab.errors import UserError
from steplab.record import Samples, Table
from steplab.record.comparison import Comparison
from steplab.trace.costs import device_name_of


def compare_stored(a: Side, b: Side) -> Comparison:
    """Hold B against A by the samples that both have; raise a UserError where one has none."""
    check_side(a)
    check_side(b)
    first, second, kind = comparable_samples((a, b))
    method = (
        f"{kind}, taken at different moments: what changed on the machine in between is not in "
        "the interval (--rerun measures in turns)."
    )
    if a.run is None or b.run is None:
        method += " A trace does not tell its spec: that both did the same work is taken for true."
    names, conditions = (a.name, b.name), _conditions(a, b)
    tables = {"sides": sides_table(a, first, b, second)}
    if apart := _apart(a, b):
        differing = _present({"differences": _differences(a, b)})
        return Comparison(
            *(*names, "not alike", apart, first, second, method, None),
            *(tables | differing, conditions),
        )
    count = min(len(first), len(second))
    change = change_of(apart_ratio(second.values, first.values), count)
    verdict, reason = verdict_on(change, count, "steps")
    details = _present(_details(a, b))
    return Comparison(
        *(*names, verdict, reason, first, second, method, change, tables | details, conditions)
    )


def compare_rounds(
    a: Side,
    rounds_a: Sequence[Samples],
    b: Side,
    rounds_b: Sequence[Samples],
    conditions: str,
) -> Comparison:
    """Hold B against A by rounds that were measured in turns, the same number of both.

    What moved is told from the stored traces: the rounds have none.
    """
    count = len(rounds_a)
    interval = round_ratio([s.values for s in rounds_b], [s.values for s in rounds_a])
    change = change_of(interval, count)
    verdict, reason = verdict_on(change, count, "rounds")
    method = (
        f"Measured again in turns by two live workers; rounds: {count}, resampled whole. What "
        "moved is told from the stored Runs."
    )
    first, second = (
        Samples(tuple(value for samples in rounds for value in samples.values), "ms")
        for rounds in (rounds_a, rounds_b)
    )
    tables = {"sides": sides_table(a, first, b, second), **_present(_details(a, b))}
    names = (a.name, b.name)
    return Comparison(
        *(*names, verdict, reason, first, second, method, change, tables, (conditions,))
    )


def check_alike(a: Side, b: Side) -> None:
    """Raise a UserError where the work differs."""
    if apart := _apart(a, b):
        raise UserError(f"A and B cannot be held against each other: {apart}")


def _apart(a: Side, b: Side) -> str:
    """Why the work differs, as a sentence; "" when it is the same, or when a trace hides it."""
    if a.run is None or b.run is None:
        return ""
    apart = what_sets_apart(a.run, b.run)
    return f"they did different work: {', '.join(apart)}." if apart else ""


def _differences(a: Side, b: Side) -> Table | None:
    return differences_table(a.run, b.run) if a.run and b.run else None


def _details(a: Side, b: Side) -> dict[str, Table | None]:
    """What differs and what moved; None where the sides do not tell."""
    tables = {"differences": _differences(a, b)}
    clocks = [side.run.clock if side.run else None for side in (a, b)]
    if clocks[0] and clocks[1]:
        tables["phases"] = phases_table(clocks[0], clocks[1])
    if a.budget and b.budget:
        tables["budget"] = budget_table(a.budget, b.budget)
        tables["kernels"] = kernels_table(a.cycles, b.cycles)
        tables["modules"] = modules_table(a.cycles, b.cycles)
    return tables


def _present(tables: dict[str, Table | None]) -> dict[str, Table]:
    return {name: table for name, table in tables.items() if table is not None}


def _where(side: Side) -> str:
    """The conditions of a Run; of a trace its device, where it names one."""
    if side.run is not None:
        return side.run.environment.conditions_on(side.run.spec.device)
    return device_name_of(side.cycles[0].trace) if side.cycles else ""


def _conditions(a: Side, b: Side) -> tuple[str, ...]:
    """Conditions of both, once where they are the same."""
    known = {letter: _where(side) for letter, side in (("A", a), ("B", b))}
    named = {letter: text for letter, text in known.items() if text}
    if len(named) == 2 and len(set(named.values())) == 1:
        return (named["A"],)
    return tuple(f"{letter}: {text}" for letter, text in named.items())
