"""The numbers of a cell, read from its Run. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from steplab.record import Run, Samples
from steplab.studies.ops.op import Objective

ERRORS = "errors"  # the table of a Run that holds its deviations from fp64
WRONG = "wrong"  # the first word of the reason where they exceed their budget
KEPT = "between"  # the pause after the forward: what the backward needs, and the output


@dataclass(frozen=True)
class Seen:
    """Medians and bytes of one cell; None where it was not measured."""

    forward_ms: float | None
    backward_ms: float | None
    both_ms: float | None
    host_ms: float | None
    repeats: int
    extra_bytes: int | None  # at most, beyond what was there before
    kept_bytes: int | None  # from forward to backward, the output among them
    errors: dict[str, float]  # by result
    of_budget: float | None  # the largest share of an error budget
    checked: str
    status: str

    def value(self, objective: Objective) -> float | None:
        """Return what is to be small."""
        if objective == "memory":
            return self.extra_bytes
        values = {"forward": self.forward_ms, "backward": self.backward_ms, "both": self.both_ms}
        return values[objective]


def samples_of(run: Run, objective: Objective) -> Samples:
    """Return every measured time of a cell that `objective` names; none for memory."""
    if run.clock is None or objective == "memory":
        return Samples((), "ms")
    return run.clock.step if objective == "both" else run.clock.phases[objective]


def seen(run: Run) -> Seen:
    """Read a Run of a cell, however it ended."""
    memory, table = run.memory, run.tables.get(ERRORS)
    rows = table.rows if table else ()
    shares = [max(_number(r[1]) / _number(r[2]), _number(r[3])) for r in rows]
    extra = memory.peak - memory.before if memory else None
    return Seen(
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
