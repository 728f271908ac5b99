"""Ceilings: the most that a suggestion can gain, by what each part of the step takes. No torch.

The parts come from the time budget of the profiled step, and from the times of its ops and phases,
which its trace tells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from steplab.core import Budget, Clock, Run, StepBudget, units
from steplab.techniques.context import Objective, Savings
from steplab.trace.analysis import Analysis, Floats
from steplab.trace.budget import idle_before
from steplab.trace.phases import PHASES

MIN_SHARE = 0.02  # a ceiling below this share of the step, or of its peak, is not worth a try
# Terms of the budget in which the device waits for the host.
STARVED_TERMS = ("launch", "dispatch", "synchronization")
THEIR_WAITS = "idle:waiting for these"


@dataclass(frozen=True)
class Ceiling:
    """`value` in ms (or bytes, of the peak), its share of the whole, and what it is made of."""

    value: float
    share: float
    parts: str


def serves(savings: Savings, objective: Objective) -> bool:
    """Whether a suggestion serves the objective; one that names no savings may serve any."""
    return not savings or bool(_for_objective(savings, objective))


def ceiling(
    savings: Savings, run: Run, known: Mapping[str, float], objective: Objective
) -> Ceiling | None:
    """Return the most that `savings` can gain; None where the size of some part is not known.

    `known` has ms of parts that the Run itself does not tell: of ops ("op:attention"), of phases
    ("phase:optimizer"), and for which the device waited before an op's kernels ("idle:attention").
    """
    wanted = _for_objective(savings, objective)
    sizes = {part: _size(part, run, known) for part in wanted}
    if not wanted or any(size is None for size in sizes.values()):
        return None
    gains = {part: (sizes[part] or 0.0) * share for part, share in wanted.items()}
    gains[THEIR_WAITS] = _idle(wanted, run, known)
    whole = step_ms(run) if objective == "time" else _peak_bytes(run)
    total = min(sum(gains.values()), whole)
    show = units.milliseconds if objective == "time" else units.bytes_
    return Ceiling(total, total / whole if whole else 0.0, _parts(gains, show))


def _for_objective(savings: Savings, objective: Objective) -> Savings:
    in_bytes = objective == "memory"
    return {p: share for p, share in savings.items() if p.startswith("memory:") == in_bytes}


def step_ms(run: Run) -> float:
    """Return the median of a Run's timed steps."""
    assert run.clock is not None
    return run.clock.step.median


def _size(part: str, run: Run, known: Mapping[str, float]) -> float | None:
    """Return the ms (or bytes) that one part of the step takes; None: unknown."""
    scheme, _, name = part.partition(":")
    if scheme == "phase":
        share = _phase_share(name, run.clock) if run.clock else None
        return known.get(part) if share is None else share * step_ms(run)
    if scheme == "op":
        return known.get(part)
    if scheme == "ranks":
        # The rank that waits least works longest: all would still wait for it.
        return min((rank.exposed_ms for rank in run.ranks), default=None)
    if scheme == "memory":
        timeline = run.profile.memory if run.profile else None
        return float(timeline.peak_by_kind.get(name, 0)) if timeline else None
    budget = _budget(run)
    if budget is None:
        return None
    typical = _profiled_step(budget)
    if scheme == "lost":
        lost = [c.lost_ms for c in typical.categories if c.name.startswith(name)]
        known_ones = [ms for ms in lost if ms is not None]
        return max(0.0, sum(known_ones)) if known_ones else None
    if scheme == "kind":
        spent = sum(c.ms for c in typical.categories if c.name.startswith(name))
        return spent * (1.0 if budget.on_device else _scale(typical, run))
    return _term(name, typical, run, budget.on_device)


def _phase_share(name: str, clock: Clock) -> float | None:
    """Return the share of a phase in the quickest of the timed steps; None: it was not seen.

    Whoever else uses the machine lengthens some phase of most steps: three of five timed ones of an
    LSTM took 7 to 11 ms for 2.5, so an optimizer of 17 % seemed to be 7 % of the median step.
    """
    phase = clock.phases.get(name)
    if phase is None:
        return None
    ms, spent = min(zip(clock.step.values, phase.values, strict=True), default=(0.0, 0.0))
    return spent / ms if ms else 0.0


def _term(name: str, typical: StepBudget, run: Run, on_device: bool) -> float:
    """Return a term of the budget without what the profiler added.

    On a GPU the profiler slows the host, so what it adds is in the wait for launches; on a CPU it
    slows everything equally, and so does whoever else used the cores while the clock ran.
    """
    spent = typical.terms.get(name, 0.0)
    if not on_device:
        return spent * _scale(typical, run)
    return spent * (launch_share(typical, run) if name == "launch" else 1.0)


def launch_share(typical: StepBudget, run: Run) -> float:
    """Return the share of a GPU's wait for launches that the profiler has not caused."""
    spent, added = typical.terms.get("launch", 0.0), typical.wall_ms - step_ms(run)
    return max(0.0, 1 - max(0.0, added) / spent) if spent else 1.0


def _idle(wanted: Savings, run: Run, known: Mapping[str, float]) -> float:
    """Return the ms for which the device waits for the ops that a suggestion names.

    They may come from the profile of an earlier recipe, so they are limited to what the device
    still waits, less what the suggestion saves of these terms anyway.
    """
    ops = {part.partition(":")[2]: share for part, share in wanted.items() if part[:3] == "op:"}
    waited = sum(known.get(f"idle:{op}", 0.0) * share for op, share in ops.items())
    budget = _budget(run)
    if not waited or budget is None:
        return waited
    left = {term: 1 - wanted.get(f"term:{term}", 0.0) for term in STARVED_TERMS}
    waits = {
        term: _term(term, _profiled_step(budget), run, budget.on_device) for term in STARVED_TERMS
    }
    return min(waited, sum(waits[term] * left[term] for term in STARVED_TERMS))


def _budget(run: Run) -> Budget | None:
    budget = run.profile.budget if run.profile else None
    return budget if budget is not None and budget.steps else None


def _profiled_step(budget: Budget) -> StepBudget:
    """Return the typical step, or the quickest on a CPU, which others may use too."""
    if budget.on_device:
        return budget.typical
    return min(budget.worked, key=lambda step: step.wall_ms)


def _scale(typical: StepBudget, run: Run) -> float:
    """Return what a profiled ms of a CPU is in the time of the timed steps: shares stay."""
    return step_ms(run) / typical.wall_ms if typical.wall_ms else 1.0


def _peak_bytes(run: Run) -> float:
    timeline = run.profile.memory if run.profile else None
    return float(timeline.peak_bytes) if timeline else 0.0


def _parts(gains: Mapping[str, float], show: Callable[[float], str]) -> str:
    """Name the two largest parts, and how many more there are."""
    largest = sorted((part for part in gains if gains[part] > 0), key=lambda part: -gains[part])
    named = [f"{part.partition(':')[2]} {show(gains[part])}" for part in largest[:2]]
    more = [f"{len(largest) - 2} more"] if len(largest) > 2 else []
    return ", ".join(named + more)


def op_times(
    run: Run, analysis: Analysis, modules: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """Return ms per step of "op:<name>" for every op in `modules`, nested modules included.

    Forward and backward. On a GPU it is the time of the kernels; "idle:<name>" is how long the
    device waited for them, which another implementation may shorten. On a CPU the times are scaled
    to the step without the profiler.
    """
    busy, idle, found = _busy_ms(run, analysis), _idle_ms(run, analysis), {}
    for op, paths in modules.items():
        inside = [_within(label, paths) for label in analysis.work.labels]
        mine = np.array(inside, dtype=bool)[analysis.work.module]
        if busy[mine].any():
            found[f"op:{op}"] = float(busy[mine].sum())
            if analysis.budget.on_device:
                found[f"idle:{op}"] = float(idle[mine].sum())
    return found


def phase_times(run: Run, analysis: Analysis) -> dict[str, float]:
    """Return ms per step of "phase:<name>" by the trace: kernels, and the wait for them.

    The clock cannot tell the phases of a replayed graph apart. The trace can, where its kernels
    have been matched with those of a detailed step.
    """
    spent = _busy_ms(run, analysis) + _idle_ms(run, analysis)
    by_label = np.bincount(analysis.work.phase, spent, len(analysis.work.labels)).tolist()
    named = zip(analysis.work.labels, by_label, strict=True)
    return {f"phase:{label}": ms for label, ms in named if label in PHASES and ms > 0}


def _busy_ms(run: Run, analysis: Analysis) -> Floats:
    """Return what each row of Work adds to the ms of a step."""
    work, budget = analysis.work, analysis.budget
    wall = budget.typical.wall_ms if budget.steps else 0.0
    scale = step_ms(run) / wall if wall > 0 and not budget.on_device else 1.0
    inside = (work.duration * (work.step >= 0)).astype(np.float64)
    return inside * (scale / 1e6 / max(len(analysis.windows), 1))


def _idle_ms(run: Run, analysis: Analysis) -> Floats:
    """Return the ms for which the device waited for each row in the typical step.

    What the profiler added is taken away evenly from all that waited for its launch.
    """
    work, budget = analysis.work, analysis.budget
    if not budget.on_device or not budget.steps:
        return np.zeros(len(work))
    typical = budget.typical
    window = next(w for w in analysis.windows if w.number == typical.number)
    idle = idle_before(analysis.trace, analysis.windows, work, analysis.syncs, (window,))
    shares = {"launch": launch_share(typical, run)}
    total: Floats = sum((idle[term] * shares.get(term, 1.0) for term in STARVED_TERMS), np.zeros(1))
    return total[:-1] / 1e6


def _within(label: str, paths: Sequence[str]) -> bool:
    return any(label == path or label.startswith(f"{path}.") for path in paths)
