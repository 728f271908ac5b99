"""Two Runs or traces become one Comparison."""

from __future__ import annotations

from collections.abc import Sequence

from steplab.compare.bootstrap import change_of, ratio_of_rounds, ratio_of_samples, verdict_on
from steplab.compare.inputs import Side, check_side, comparable_samples
from steplab.compare.rank_diff import collectives_diff, waits_diff
from steplab.compare.same_work import condition_diff, work_differences
from steplab.compare.time_diff import budget_diff, kernel_diff, module_diff, phase_diff
from steplab.core import Cell, Column, Counters, Samples, Table
from steplab.core.comparison import Comparison, Verdict
from steplab.core.errors import UserError
from steplab.core.run import rate_name
from steplab.core.spec import axes_text, title_axes, varying_axes
from steplab.trace.roofline import trace_device_name

CLOCKS_ALIKE = 0.01  # SM clocks that differ by more are told beside the times


def compare_stored(a: Side, b: Side) -> Comparison:
    """Compare B with A by the samples that both have; raise a UserError where one has none."""
    check_side(a)
    check_side(b)
    first, second, kind = comparable_samples((a, b))
    method = (
        f"{kind}, taken at different moments: what changed on the machine in between is not in "
        "the interval (--rerun measures in turns)."
    )
    if a.run is None or b.run is None:
        method += " A trace does not carry its spec: that both did the same work is assumed."
    sides = {"sides": sides_table(a, first, b, second)}
    verdict: Verdict
    if reason := _different_work(a, b):
        verdict, change = "not alike", None
        tables = sides | _present({"differences": _differences(a, b)})
    else:
        count = min(len(first), len(second))
        change = change_of(ratio_of_samples(second.values, first.values), count)
        verdict, reason = verdict_on(change, count, "steps")
        tables = sides | _present(_details(a, b))
    names, where = (a.name, b.name), _conditions(a, b)
    return Comparison(*names, verdict, reason, first, second, method, change, tables, where)


def compare_rounds(
    a: Side,
    rounds_a: Sequence[Samples],
    b: Side,
    rounds_b: Sequence[Samples],
    conditions: str,
) -> Comparison:
    """Compare B with A by rounds that were measured in turns, the same number of both.

    What takes more or less time is read from the stored traces: the rounds have none.
    """
    count = len(rounds_a)
    interval = ratio_of_rounds([s.values for s in rounds_b], [s.values for s in rounds_a])
    change = change_of(interval, count)
    verdict, reason = verdict_on(change, count, "rounds")
    method = (
        f"Measured again in turns by two live workers; rounds: {count}, resampled whole. "
        "Details come from the stored Runs."
    )
    first, second = (
        Samples(tuple(value for samples in rounds for value in samples.values), "ms")
        for rounds in (rounds_a, rounds_b)
    )
    tables = {"sides": sides_table(a, first, b, second), **_present(_details(a, b))}
    names, where = (a.name, b.name), (conditions,)
    return Comparison(*names, verdict, reason, first, second, method, change, tables, where)


def check_same_work(a: Side, b: Side) -> None:
    """Raise a UserError where the work differs."""
    if reason := _different_work(a, b):
        raise UserError(f"A and B cannot be compared: {reason}")


def _different_work(a: Side, b: Side) -> str:
    """Why the work differs, as a sentence; "" when it is the same, or when a trace hides it."""
    if a.run is None or b.run is None:
        return ""
    differences = work_differences(a.run, b.run)
    return f"they did different work: {', '.join(differences)}." if differences else ""


def _differences(a: Side, b: Side) -> Table | None:
    return condition_diff(a.run, b.run) if a.run and b.run else None


def _details(a: Side, b: Side) -> dict[str, Table | None]:
    """What differs, and what takes more or less time; None where the sides do not tell."""
    tables = {"differences": _differences(a, b)}
    clocks = [side.run.clock if side.run else None for side in (a, b)]
    if clocks[0] and clocks[1]:
        tables["phases"] = phase_diff(clocks[0], clocks[1])
    if a.budget and b.budget:
        tables["budget"] = budget_diff(a.budget, b.budget)
        tables["kernels"] = kernel_diff(a.cycles, b.cycles)
        tables["modules"] = module_diff(a.cycles, b.cycles)
    if a.ranks and b.ranks:
        tables["communication"] = waits_diff(a.ranks, b.ranks)
        tables["collectives"] = collectives_diff(a.ranks, b.ranks)
    return tables


def _present(tables: dict[str, Table | None]) -> dict[str, Table]:
    return {name: table for name, table in tables.items() if table is not None}


def _where(side: Side) -> str:
    """The conditions of a Run; of a trace its device, where it names one."""
    if side.run is not None:
        return side.run.environment.conditions_on(side.run.spec.device)
    return trace_device_name(side.cycles[0].trace) if side.cycles else ""


def _conditions(a: Side, b: Side) -> tuple[str, ...]:
    """Conditions of both, once where they are the same, and what their traces leave out."""
    sides = {"A": a, "B": b}
    named = {letter: text for letter, side in sides.items() if (text := _where(side))}
    if len(named) == 2 and len(set(named.values())) == 1:
        where = [named["A"]]
    else:
        where = [f"{letter}: {text}" for letter, text in named.items()]
    if clocks := _clocks(a, b):
        where.append(clocks)
    return (*where, *(f"{letter}: {text}" for letter in sides for text in _left_out(sides[letter])))


def _clocks(a: Side, b: Side) -> str:
    """The cards' clocks, where they are apart or one was held back; "" where they are alike."""
    first, second = ((side.run and side.run.counters) or Counters() for side in (a, b))
    known = [c.sm_clock_mhz.median for c in (first, second) if c.sm_clock_mhz is not None]
    apart = len(known) == 2 and max(known) > (1 + CLOCKS_ALIKE) * min(known)
    if not apart and not (first.held_by or second.held_by):
        return ""
    return f"SM clocks: A {first.clock_text}; B {second.clock_text}"


def _left_out(side: Side) -> list[str]:
    return [text for cycle in side.cycles for text in cycle.trace.omissions]


def sides_table(a: Side, samples_a: Samples, b: Side, samples_b: Samples) -> Table:
    """Return A and B with their step times, and what a Run tells besides."""
    columns = (
        Column(""),
        Column("Run or trace"),
        Column("what"),
        Column("step median", "ms"),
        Column("p10", "ms"),
        Column("p90", "ms"),
        Column("spread", "%"),
        Column("steps"),
        Column(rate_name(side.run for side in (a, b) if side.run)),
        Column("MFU", "%"),
        Column("peak memory", "GiB"),
    )
    specs = [side.run.spec for side in (a, b) if side.run]
    axes = varying_axes(specs)
    rows = (("A", *_row(a, samples_a, axes)), ("B", *_row(b, samples_b, axes)))
    return Table("A and B", columns, rows).without_unknown_columns()


def _row(side: Side, samples: Samples, differing: Sequence[str]) -> tuple[Cell, ...]:
    times = (samples.median, samples.percentile(10), samples.percentile(90), samples.spread * 100)
    run = side.run
    if run is None:
        return (side.name, None, *times, len(samples), None, None, None)
    tokens = round(run.work.tokens_per_second(samples.median)) if run.work else None
    # A stored MFU belongs to the stored times, not to those of another measurement.
    own = run.clock is not None and samples == run.clock.step
    mfu = run.figures.possible_mfu if run.figures and own else None
    axes = list(dict.fromkeys([*title_axes([run.spec]), *differing]))
    what = f"{run.spec.workload}: {axes_text(run.spec, axes)}"
    memory = run.memory.peak / 2**30 if run.memory else None
    share = None if mfu is None else mfu * 100
    return (side.name, what, *times, len(samples), tokens, share, memory)
