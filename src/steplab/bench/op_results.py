"""The numbers of a cell, read from its Run, and which variant is best at each shape. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from steplab.bench.op_bench import Objective, OpBench
from steplab.compare.bootstrap import MIN_SAMPLES, RatioInterval, ratio_of_samples
from steplab.core import Cell, Run, Samples

ERRORS = "errors"  # the table of a Run that holds its errors against fp64
WRONG = "wrong"  # the first word of the reason where one exceeds its budget
KEPT = "between"  # after the forward: what the backward needs, and the output
MIB = 2**20


@dataclass(frozen=True)
class CellResult:
    """Medians and bytes of one cell; None where it was not measured."""

    forward_ms: float | None
    backward_ms: float | None
    both_ms: float | None
    host_ms: float | None
    repeats: int
    extra_bytes: int | None  # the peak, beyond what was there before
    kept_bytes: int | None  # from forward to backward, the output among them
    errors: dict[str, float]  # by result
    of_budget: float | None  # the largest share of an error budget
    checked: str
    status: str

    def value(self, objective: Objective) -> float | None:
        """Return the number that the objective makes small: milliseconds, or bytes."""
        if objective == "memory":
            return self.extra_bytes
        values = {"forward": self.forward_ms, "backward": self.backward_ms, "both": self.both_ms}
        return values[objective]


def samples_of(run: Run, objective: Objective) -> Samples:
    """Return the times of a cell that `objective` names; none for memory."""
    if run.clock is None or objective == "memory":
        return Samples((), "ms")
    return run.clock.step if objective == "both" else run.clock.phases[objective]


def cell_result(run: Run) -> CellResult:
    """Return the numbers of a cell from its Run, however it ended."""
    memory, table = run.memory, run.tables.get(ERRORS)
    rows = table.rows if table else ()
    shares = [max(_number(r[1]) / _number(r[2]), _number(r[3])) for r in rows]
    extra = memory.peak - memory.before if memory else None
    return CellResult(
        forward_ms=_median(samples_of(run, "forward")),
        backward_ms=_median(samples_of(run, "backward")),
        both_ms=_median(samples_of(run, "both")),
        host_ms=_median(run.clock.host) if run.clock else None,
        repeats=len(samples_of(run, "forward")),
        extra_bytes=extra,
        kept_bytes=memory.phase_peaks[KEPT] - memory.before if memory else None,
        errors={str(r[0]): _number(r[1]) for r in rows},
        of_budget=max(shares) if shares else None,
        checked=table.title.removeprefix("against fp64: ") if table else "",
        status=WRONG if run.reason.startswith(f"{WRONG}:") else run.status,
    )


def _median(samples: Samples) -> float | None:
    return samples.median if samples.values else None


def _number(cell: object) -> float:
    # A table's JSON has "Infinity" as text, because it may hold any cell.
    return float(cell) if isinstance(cell, (int, float, str)) else float("nan")


def group_by_shape(bench: OpBench, runs: Sequence[Run]) -> list[list[Run]]:
    """Return the Runs grouped by what they compute, in the order of their first."""
    groups: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(run.spec.config[name] for name in bench.shape), []).append(run)
    return list(groups.values())


def rank_runs(runs: Sequence[Run], objective: Objective) -> list[Run]:
    """Return the Runs that are right and have a number, the best first."""
    values = [(cell_result(run).value(objective), run) for run in runs if run.status == "ok"]
    measured = [(value, run) for value, run in values if value is not None]
    return [run for _, run in sorted(measured, key=lambda pair: pair[0])]


def best_run(runs: Sequence[Run], objective: Objective) -> Run | None:
    """Return the best Run of one shape; None where none is right."""
    order = rank_runs(runs, objective)
    return order[0] if order else None


def best_mark(runs: Sequence[Run], objective: Objective) -> str:
    """Return `best`, or `best?` where the next one cannot be told from it."""
    order = rank_runs(runs, objective)
    if objective == "memory" or len(order) < 2:
        return "best"
    interval = _next_over_best(order, objective)
    return "best" if interval is not None and interval.excludes_one else "best?"


def verdict(bench: OpBench, runs: Sequence[Run], objective: Objective) -> tuple[Cell, ...]:
    """Return the best, its number, the next, next / best, and whether that is more than noise."""
    order = rank_runs(runs, objective)
    if not order:
        return "none", "", "", "", "no row is right"
    value = cell_result(order[0]).value(objective)
    number = value / MIB if value is not None and objective == "memory" else value
    best = bench.variant_text(order[0].spec.config)
    if len(order) == 1:
        return best, number, "", "", "no other row is right"
    other = cell_result(order[1]).value(objective)
    ratio = other / value if value and other is not None else None
    following = bench.variant_text(order[1].spec.config)
    return best, number, following, ratio, _confidence(order, objective)


def _confidence(order: Sequence[Run], objective: Objective) -> str:
    """Say how sure it is that the first of `order` is better than the second."""
    if objective == "memory":
        equal = cell_result(order[0]).extra_bytes == cell_result(order[1]).extra_bytes
        return "equal" if equal else "exact"
    interval = _next_over_best(order, objective)
    if interval is None:
        return f"cannot tell: fewer than {MIN_SAMPLES} samples"
    shown = f"{interval.low:.3f} to {interval.high:.3f}"
    return shown if interval.excludes_one else f"cannot tell: {shown}"


def _next_over_best(order: Sequence[Run], objective: Objective) -> RatioInterval | None:
    """Return the ratio of times, second over first; None with too few samples."""
    best, following = (samples_of(run, objective).values for run in order[:2])
    if min(len(best), len(following)) < MIN_SAMPLES:
        return None
    return ratio_of_samples(following, best)
