"""Two live steps measured in turns, so that a drifting machine cannot decide. No torch.

A round times some steps of each side, and the order flips from round to round. Either the caller
says how many rounds there are (`alternate_specs`), or they go on until the difference is clear, or
clearly too small to matter (`alternate_until_clear`). How often they are looked at, and how sure a
look must be, is fixed beforehand; time may end them, and no time depends on who is ahead.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol, TypeVar

from steplab.compare.bootstrap import (
    RatioInterval,
    change_of,
    ratio_of_rounds,
    student_quantile,
    verdict_on,
)
from steplab.core import RunSpec, Samples
from steplab.core.comparison import Change, Verdict
from steplab.core.errors import MeasurementError
from steplab.core.spec import axes_text, varying_axes
from steplab.workers.client import Progress, WorkerLost, WorkerOwner, no_progress
from steplab.workers.ranks import start_worker

LIVE_STEP = "steplab.step.live:LiveStep"
ROUNDS = 6  # the fewest that allow an interval by resampling
# A clear difference needs fewer. After so many rounds, Student's interval at 99 %: with three
# looks, equal steps are taken for different ones about as often as with one look at 95 %.
PEEKS: tuple[int, ...] = (3, 4, 5)
PEEK_CONFIDENCE = 0.99
MORE_ROUNDS = 6  # where the first six do not decide
USUAL_ROUNDS = ROUNDS + MORE_ROUNDS
# Where a decision is worth the rest of a budget: further looks, as sure as the first ones.
LATE_LOOKS = (24, 48, 96)
ROUND_SECONDS = 0.3  # of each side
# One step that the host delays spoils a round of one step, but not the median of three. With steps
# of 220 ms, one a round, the interval was 0.87 to 1.21 after twelve rounds.
SURE_STEPS, SURE_SECONDS = 3, 1.1  # three steps, unless they take longer than this
MAX_STEPS = 50
# After so many seconds no round is begun, except for the first three, without which there is no
# interval: on a busy machine more rounds do not help. The share of a budget of 2.5 minutes is 10 s,
# in which twelve rounds fit on a quiet machine.
MAX_SECONDS = 30.0
MAX_SHARE = 1 / 15

T = TypeVar("T")
Rounds = Sequence[tuple[Samples, Samples]]


class LiveSide(Protocol):
    """One of the two steps that are measured in turns."""

    def measure(self, steps: int, timeout: float) -> Samples:
        """Time so many steps; milliseconds each."""
        ...


class RemoteStep(WorkerOwner):
    """A step that stays alive in a worker of its own until the `with` block ends.

    The worker keeps an object with a method `measure(steps)`, such as LiveStep.
    """

    def call(
        self,
        method: str,
        returns: type[T],
        timeout: float,
        progress: Progress = no_progress,
        **arguments: Any,
    ) -> T:
        """Call a method of the step; a worker that is lost is a MeasurementError."""
        try:
            return self.worker.call(
                method, returns, timeout=timeout, progress=progress, **arguments
            )
        except WorkerLost as lost:
            raise MeasurementError(f"A worker was lost: {lost.reason}.") from None

    def keep(self, factory: str, timeout: float, **arguments: Any) -> None:
        """Make the step in the worker; one that is lost is a MeasurementError."""
        try:
            self.worker.keep(factory, timeout=timeout, **arguments)
        except WorkerLost as lost:
            raise MeasurementError(f"A worker was lost: {lost.reason}.") from None

    def measure(self, steps: int, timeout: float) -> Samples:
        """Time so many steps; milliseconds each."""
        return self.call(".measure", Samples, timeout, steps=steps)


def alternate_specs(
    first: RunSpec,
    second: RunSpec,
    rounds: int,
    timeout: float = 600.0,
    progress: Progress = no_progress,
) -> tuple[list[Samples], list[Samples]]:
    """Measure two specs in turns, `spec.steps` steps of each in every round.

    Returns the samples of every round, of the first and of the second spec. A worker that is lost,
    or that did not run what was asked for, is a MeasurementError.
    """
    with RemoteStep(start_worker(first)) as one, RemoteStep(start_worker(second)) as two:
        sides, specs = (one, two), (first, second)
        for side, spec in zip(sides, specs, strict=True):
            progress(f"preparing {axes_text(spec, varying_axes(specs) or ['recipe'])}")
            side.keep(LIVE_STEP, timeout, spec=spec)
        measured = []
        for number in range(rounds):
            progress(f"round {number + 1}/{rounds}")
            measured.append(_round(sides, (first.steps, second.steps), number, timeout))
        for side in sides:
            side.call(".check", type(None), timeout)
    return [pair[0] for pair in measured], [pair[1] for pair in measured]


@dataclass(frozen=True)
class Alternation:
    """The samples of both sides, pooled, and whether the second is faster or slower."""

    before: Samples
    after: Samples
    change: Change
    verdict: Verdict


@dataclass(frozen=True)
class Patience:
    """How long a difference is measured on that the usual rounds leave undecided."""

    until: float  # by `monotonic`; after it no round is begun
    gain: float  # once the second side surely gains less than this, it is decided as well
    again: bool = False  # these steps were undecided before: every look is at PEEK_CONFIDENCE


def seconds_per_rung(budget: float) -> float:
    """Return the most seconds that the alternation of one rung may take of a search's budget."""
    return min(MAX_SECONDS, MAX_SHARE * budget)


def alternate_until_clear(
    first: LiveSide,
    second: LiveSide,
    *,
    step_ms: float,
    seconds: float,
    timeout: float,
    progress: Progress = no_progress,
    gain: float | None = None,
    patience: Patience | None = None,
) -> Alternation:
    """Measure in turns until the difference is clear.

    `step_ms` is how long a step has taken so far; how long it takes now decides how many steps a
    round has. After `seconds` no more rounds are begun. `gain` (0.01: 1 %) is the least that is
    looked for: the rounds also end once the second side surely gains less. None: any gain counts.
    With `patience` there are more rounds where the usual ones do not decide.
    """
    end, most, looks = monotonic() + seconds, USUAL_ROUNDS, (*PEEKS, ROUNDS, USUAL_ROUNDS)
    if patience is not None:
        end, most, looks = max(end, patience.until), LATE_LOOKS[-1], (*looks, *LATE_LOOKS)
    rounds: list[tuple[Samples, Samples]] = []
    while True:
        progress(f"turns, round {len(rounds) + 1}")
        steps = _steps_per_round(step_ms)
        rounds.append(_round((first, second), (steps, steps), len(rounds), timeout))
        step_ms = max(samples.median for samples in rounds[-1])
        late = monotonic() > end and len(rounds) >= min(PEEKS)
        if late or len(rounds) in looks:
            by_resampling = ROUNDS <= len(rounds) <= USUAL_ROUNDS
            strict = patience is not None and patience.again
            found = _decide(rounds) if by_resampling and not strict else _by_student(rounds)
            least = gain
            if patience is not None and (strict or len(rounds) >= USUAL_ROUNDS):
                least = patience.gain
            is_hopeless = least is not None and found.change.low > -least
            is_last = late or len(rounds) >= most
            if is_last or is_hopeless or found.verdict != "cannot tell":
                return found


def round_seconds(first_ms: float, second_ms: float) -> float:
    """Return the seconds that a round of two such steps takes."""
    return _steps_per_round(max(first_ms, second_ms)) * (first_ms + second_ms) / 1e3


def _round(
    sides: tuple[LiveSide, LiveSide], steps: tuple[int, int], number: int, timeout: float
) -> tuple[Samples, Samples]:
    """Measure one round; the second side goes first in every other one."""
    first, second = (0, 1) if number % 2 == 0 else (1, 0)
    seen = {i: sides[i].measure(steps[i], timeout) for i in (first, second)}
    return seen[0], seen[1]


def _steps_per_round(step_ms: float) -> int:
    """Return the steps of one side of a round."""
    seconds = max(step_ms, 1e-3) / 1e3
    sure = min(SURE_STEPS, int(SURE_SECONDS / seconds))
    return max(1, sure, min(round(ROUND_SECONDS / seconds), MAX_STEPS))


def _decide(rounds: Rounds) -> Alternation:
    """Return what six or more rounds tell, by resampling whole rounds."""
    interval = ratio_of_rounds([b.values for _, b in rounds], [a.values for a, _ in rounds])
    change = change_of(interval, len(rounds))
    verdict, _ = verdict_on(change, len(rounds), "rounds")
    return _alternation(rounds, change, verdict)


def _by_student(rounds: Rounds) -> Alternation:
    """Return what three rounds or more tell, by the ratios of their medians."""
    interval = student_ratio([after.median / before.median for before, after in rounds])
    change = Change(
        interval.ratio - 1,
        interval.low - 1,
        interval.high - 1,
        PEEK_CONFIDENCE,
        detectable=None,
    )
    sure: Verdict = "slower" if change.low > 0 else "faster"
    return _alternation(rounds, change, sure if interval.excludes_one else "cannot tell")


def student_ratio(ratios: Sequence[float]) -> RatioInterval:
    """Return the mean of 3 or more ratios on a logarithmic scale, with its interval at 99 %."""
    logs = [math.log(ratio) for ratio in ratios]
    middle = statistics.fmean(logs)
    quantile = student_quantile(len(logs) - 1, PEEK_CONFIDENCE)
    half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return RatioInterval(*(math.exp(x) for x in (middle, middle - half, middle + half)))


def _alternation(rounds: Rounds, change: Change, verdict: Verdict) -> Alternation:
    before, after = (pool_rounds([pair[side] for pair in rounds]) for side in (0, 1))
    return Alternation(before, after, change, verdict)


def pool_rounds(rounds: Sequence[Samples]) -> Samples:
    """Return the values of all rounds; those far above the median are marked.

    A round has too few values to tell which are slow; its marks say what was seen in a step.
    """
    pooled = Samples(tuple(value for one in rounds for value in one.values), "ms")
    marks, begin = dict(pooled.with_slow_marked().marks), 0
    for one in rounds:
        seen = {str(begin + int(index)): text for index, text in one.marks.items()}
        marks |= {index: text for index, text in seen.items() if index in marks}
        begin += len(one)
    return Samples(pooled.values, "ms", marks)
