"""Two live candidates measured in turns, until the difference is told or cannot be. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from steplab.compare.bootstrap import RatioInterval, change_of, ratio_of_rounds, verdict_on
from steplab.core import Samples
from steplab.core.comparison import Change, Verdict
from steplab.verify.remote import RemoteCandidate

ROUNDS = 6  # the fewest that allow an interval by resampling
# A clear difference is told sooner. After so many rounds, Student's quantile at 99 %: looking three
# times, a difference that is none is taken for one about as often as once at 95 %.
PEEKS = {3: 9.925, 4: 5.841, 5: 4.604}
PEEK_CONFIDENCE = 0.99
MORE_ROUNDS = 6  # where the first do not tell
ROUND_SECONDS = 0.3  # of each side
# One step that the host held up spoils a round of one, not of three: their median counts. Steps of
# 220 ms, one a round, left an interval of 0.87 to 1.21 after twelve rounds.
SURE_STEPS, SURE_SECONDS = 3, 1.1  # as long as they take no longer; a slower step is a round
MAX_STEPS = 50
# After so many seconds no round is begun, except for the first three, without which there is no
# interval: on a busy machine more of them tell no more. Of a budget of 2.5 minutes that is 10 s,
# in which twelve rounds fit on a quiet machine.
MAX_SECONDS = 30.0
MAX_SHARE = 1 / 15


@dataclass(frozen=True)
class Alternation:
    """The samples of both sides, pooled, and what may be said of the second."""

    before: Samples
    after: Samples
    change: Change
    verdict: Verdict


def seconds_per_rung(budget: float) -> float:
    """Return the most seconds that the turns of one rung may take of a search's budget."""
    return min(MAX_SECONDS, MAX_SHARE * budget)


def alternate(
    first: RemoteCandidate,
    second: RemoteCandidate,
    step_ms: float,
    seconds: float,
    timeout: float,
    progress: Callable[[str], None],
    gain: float | None = None,
) -> Alternation:
    """Measure in turns until the difference is clear; the order flips from round to round.

    `step_ms` is how long a step has taken so far; how long it takes now decides on the number of
    steps in a round. After `seconds` no more rounds are begun. `gain` (0.01: 1 %) is the least that
    is looked for: the turns end, too, once the second side surely gains less. None: any is.
    """
    begun = monotonic()
    pairs: list[tuple[Samples, Samples]] = []
    while True:
        progress(f"turns, round {len(pairs) + 1}")
        sides = (first, second) if len(pairs) % 2 == 0 else (second, first)
        seen = {side: side.turn(_steps_per_round(step_ms), timeout) for side in sides}
        step_ms = max(samples.median for samples in seen.values())
        pairs.append((seen[first], seen[second]))
        late = monotonic() - begun > seconds and len(pairs) >= min(PEEKS)
        if late or len(pairs) in (*PEEKS, ROUNDS, ROUNDS + MORE_ROUNDS):
            turns = _decide(pairs) if len(pairs) >= ROUNDS else _peek(pairs)
            is_last = late or len(pairs) > ROUNDS
            is_hopeless = gain is not None and turns.change.low > -gain
            if is_last or is_hopeless or turns.verdict != "cannot tell":
                return turns


def _steps_per_round(step_ms: float) -> int:
    """Return the steps of one side of a round."""
    seconds = max(step_ms, 1e-3) / 1e3
    sure = min(SURE_STEPS, int(SURE_SECONDS / seconds))
    return max(1, sure, min(round(ROUND_SECONDS / seconds), MAX_STEPS))


def _decide(pairs: Sequence[tuple[Samples, Samples]]) -> Alternation:
    before, after = ([pair[side] for pair in pairs] for side in (0, 1))
    interval = ratio_of_rounds([s.values for s in after], [s.values for s in before])
    change = change_of(interval, len(pairs))
    verdict, _ = verdict_on(change, len(pairs), "rounds")
    return Alternation(_pool(before), _pool(after), change, verdict)


def _peek(pairs: Sequence[tuple[Samples, Samples]]) -> Alternation:
    """Return what few rounds tell, by the ratios of their medians."""
    interval = student_ratio([after.median / before.median for before, after in pairs])
    bounds = (interval.ratio - 1, interval.low - 1, interval.high - 1)
    change = Change(*bounds, PEEK_CONFIDENCE, detectable=None)
    before, after = ([pair[side] for pair in pairs] for side in (0, 1))
    sure: Verdict = "slower" if change.low > 0 else "faster"
    verdict: Verdict = sure if interval.excludes_one else "cannot tell"
    return Alternation(_pool(before), _pool(after), change, verdict)


def student_ratio(ratios: Sequence[float]) -> RatioInterval:
    """Return the mean of 3 to 5 ratios on a logarithmic scale, with its interval at 99 %."""
    logs = [math.log(ratio) for ratio in ratios]
    middle = statistics.fmean(logs)
    half = PEEKS[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs))
    return RatioInterval(*(math.exp(x) for x in (middle, middle - half, middle + half)))


def _pool(rounds: Sequence[Samples]) -> Samples:
    return Samples(tuple(value for samples in rounds for value in samples.values), "ms")
