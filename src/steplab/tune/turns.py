"""Two live candidates measured in turns, until the difference is told or cannot be. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from steplab.compare.statistics import round_ratio
from steplab.compare.verdict import change_of, verdict_on
from steplab.engine.gate.remote import RemoteCandidate
from steplab.record import Samples
from steplab.record.comparison import Change, Verdict

ROUNDS = 6  # the fewest that allow an interval
MORE_ROUNDS = 6  # where the first do not tell
ROUND_SECONDS = 0.3  # of each side; a step that takes longer is a round of LEAST_STEPS
LEAST_STEPS, MOST_STEPS = 2, 50
MOST_SECONDS = 30.0  # after which no more rounds than ROUNDS are taken


@dataclass(frozen=True)
class Turns:
    """The samples of both sides, pooled, and what may be said of the second."""

    before: Samples
    after: Samples
    change: Change
    verdict: Verdict
    reason: str


def take_turns(
    first: RemoteCandidate,
    second: RemoteCandidate,
    step_ms: float,
    timeout: float,
    progress: Callable[[str], None],
) -> Turns:
    """Measure in turns; the order flips from round to round.

    `step_ms` is how long a step has taken so far; how long it takes now decides on the number of
    steps in a round.
    """
    begun = monotonic()
    pairs: list[tuple[Samples, Samples]] = []
    for rounds in (ROUNDS, MORE_ROUNDS):
        for _ in range(rounds):
            progress(f"in turns, round {len(pairs) + 1}")
            sides = (first, second) if len(pairs) % 2 == 0 else (second, first)
            seen = {side: side.turn(_steps(step_ms), timeout) for side in sides}
            step_ms = max(samples.median for samples in seen.values())
            pairs.append((seen[first], seen[second]))
        turns = _told(pairs)
        if turns.verdict != "cannot tell" or monotonic() - begun > MOST_SECONDS:
            break
    return turns


def _steps(step_ms: float) -> int:
    """Return the steps of one side of a round."""
    steps = round(ROUND_SECONDS * 1e3 / max(step_ms, 1e-3))
    return max(LEAST_STEPS, min(steps, MOST_STEPS))


def _told(pairs: list[tuple[Samples, Samples]]) -> Turns:
    before, after = ([pair[side] for pair in pairs] for side in (0, 1))
    interval = round_ratio([s.values for s in after], [s.values for s in before])
    change = change_of(interval, len(pairs))
    verdict, reason = verdict_on(change, len(pairs), "rounds")
    return Turns(_pooled(before), _pooled(after), change, verdict, reason)


def _pooled(rounds: list[Samples]) -> Samples:
    return Samples(tuple(value for samples in rounds for value in samples.values), "ms")
