"""The late rank: which one the others wait for, in which steps, by how much, and why.

The cause is what the late rank spends more time on than the others do, communication left out: the
term of the budget with the largest excess, and the names of the work behind it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from steplab.core import StepBudget, units
from steplab.trace.analysis import UNATTRIBUTED, Floats
from steplab.trace.ranks.rank_trace import RankTrace, Total
from steplab.trace.ranks.waits import MS, Waits

MOST_OF_ALL = 2 / 3  # of all waiting must be for one rank, or the ranks take turns in being late
LATE = 0.5  # of the largest delay: a step with less is not one in which the rank is late
REPEATED = 2  # steps: once, any rank of a busy machine is late
STEADY = 3  # standard errors over the steps
SHOWN = 3  # lines of evidence
NOTABLE = 0.1  # of the excess: a line with less does not explain it
SLOWER = 1.05  # times as long as on other ranks
MOSTLY = 0.7  # of the work by time: if that much is slower, all is
CAUSES = {
    "kernels": ("kernels",),
    "copies": ("copies",),
    "data wait": ("data wait",),
    "synchronization": ("synchronization",),
    "host": ("launch", "dispatch", "residual"),
}


@dataclass(frozen=True)
class LateRank:
    """A rank that the others wait for; times in ms."""

    rank: int
    delay_ms: float  # by which it comes late, the median of the steps in which it does
    steps: tuple[int, ...]  # in which it does
    recorded: int  # steps
    waiting_ms: float  # per step of another rank, over all steps
    share: float  # of all waiting of all ranks
    steady: bool  # in so many steps, and by so much, that no chance disturbance explains it
    cause: str  # a key of CAUSES, "operators" for kernels without a device; "": not seen
    excess_ms: float  # that it spends on that more than the others do, per step in which it is late
    evidence: tuple[str, ...]

    @property
    def when(self) -> str:
        """In which steps it is late, in words."""
        if self.recorded == 1:
            return "in the one step recorded"
        if len(self.steps) == self.recorded:
            return "in every step"
        first, last = self.steps[0], self.steps[-1]
        if last - first + 1 == len(self.steps) > 1:
            return f"from step {first} to {last}, of {self.recorded} recorded"
        listed = ", ".join(map(str, self.steps[:5])) + (", ..." if len(self.steps) > 5 else "")
        word = "step" if len(self.steps) == 1 else "steps"
        return f"in {word} {listed}, of {self.recorded} recorded"


def find_late_rank(ranks: Sequence[RankTrace], waits: Waits) -> LateRank | None:
    """Return the rank that most waiting is for; None if there is none, or ranks take turns.

    Nor is a rank called late that was so in one step of several.
    """
    delays = np.array([waits.delay(place) for place in range(len(ranks))])
    totals = delays.sum(axis=1) if delays.size else np.zeros(len(ranks))
    if len(ranks) < 2 or not totals.sum() > 0:
        return None
    place = int(totals.argmax())
    share = float(totals[place] / totals.sum())
    if share < MOST_OF_ALL:
        return None
    delay = delays[place]
    late = delay >= LATE * delay.max()
    if late.sum() < min(REPEATED, len(late)):
        return None
    cause, excess, evidence = _cause(ranks, place, waits.steps)
    return LateRank(
        rank=rank_number(ranks[place], place),
        delay_ms=float(np.median(delay[late])),
        steps=tuple(np.array(waits.steps)[late].tolist()),
        recorded=len(waits.steps),
        waiting_ms=float(delay.mean()),
        share=share,
        steady=_is_steady(delay - np.delete(delays, place, axis=0).max(axis=0)),
        cause=cause,
        excess_ms=excess / int(late.sum()),
        evidence=evidence,
    )


def _is_steady(later: Floats) -> bool:
    """Tell whether a rank is later than the others (ms by step) by more than the steps differ.

    One step cannot tell: ranks begin to record one after the other.
    """
    if len(later) < 2:
        return False
    error = float(later.std(ddof=1)) / math.sqrt(len(later))
    return float(later.mean()) > STEADY * error


def rank_number(rank: RankTrace, place: int) -> int:
    """Return the number of a rank; its place where the file does not tell."""
    return place if rank.place.rank is None else rank.place.rank


def _cause(
    ranks: Sequence[RankTrace], place: int, steps: Sequence[int]
) -> tuple[str, float, tuple[str, ...]]:
    """Return the largest excess of a rank over the others: its name, ms in all steps, evidence."""
    spent = [_spent(rank, steps) for rank in ranks]
    others = [one for i, one in enumerate(spent) if i != place]
    excess = {
        name: spent[place][name] - statistics.median(one[name] for one in others) for name in CAUSES
    }
    name = max(excess, key=lambda one: excess[one])
    if excess[name] <= 0:
        return "", 0.0, ()
    own, rest = ranks[place], [rank for i, rank in enumerate(ranks) if i != place]
    evidence: tuple[str, ...] = ()
    if name == "kernels":
        evidence = tuple(_more_work(own.work, [rank.work for rank in rest], len(steps)))
    elif name in ("host", "data wait"):
        evidence = tuple(_more_silence(own, rest, len(steps), excess[name]))
    told = own.budget.term_name("kernels") if name == "kernels" else name
    return told, excess[name], evidence[:SHOWN]


def _spent(rank: RankTrace, steps: Sequence[int]) -> dict[str, float]:
    """Return ms of each cause in all `steps`."""
    chosen = [step for step in rank.budget.steps if step.number in set(steps)]

    def ms(step: StepBudget, term: str) -> float:
        return step.residual_ms if term == "residual" else step.terms.get(term, 0.0)

    return {
        name: sum(ms(step, term) for step in chosen for term in terms)
        for name, terms in CAUSES.items()
    }


def _more_work(
    own: Mapping[str, Total], others: Sequence[Mapping[str, Total]], steps: int
) -> Iterator[str]:
    """Yield the work that takes longer here: all of it alike, or the names with most excess."""
    typical = {name: _typical(name, others) for name in own}
    same = [n for n, total in own.items() if total.count == typical[n].count and typical[n].ns]
    whole = sum(own[name].ns for name in own)
    slower = sum(own[n].ns for n in same if own[n].ns > SLOWER * typical[n].ns)
    if slower > MOSTLY * whole:
        ratio = sum(own[n].ns for n in same) / sum(typical[n].ns for n in same)
        yield f"the same work takes {units.ratio(ratio)} the time: lower clocks, or a busy neighbor"
        return
    excess = {name: own[name].ns - typical[name].ns for name in own}
    for name in sorted(excess, key=lambda one: -excess[one])[:SHOWN]:
        if excess[name] > 0:
            more = (own[name].count - typical[name].count) / steps
            counted = f"{more:+.3g} a step, " if more else ""
            yield f"{name}: {counted}{units.milliseconds(excess[name] * MS / steps)} more"


def _typical(name: str, others: Sequence[Mapping[str, Total]]) -> Total:
    totals = [one.get(name, Total(0, 0)) for one in others]
    return Total(
        round(statistics.median(total.count for total in totals)),
        round(statistics.median(total.ns for total in totals)),
    )


def _more_silence(
    own: RankTrace, others: Sequence[RankTrace], steps: int, whole_ms: float
) -> Iterator[str]:
    """Yield the lines of the host in which it is idle for longer than the others, by much."""
    excess = {
        line: ns - statistics.median(rank.silent_ns.get(line, 0) for rank in others)
        for line, ns in own.silent_ns.items()
        if line != UNATTRIBUTED
    }
    for line in sorted(excess, key=lambda one: -excess[one]):
        if excess[line] * MS > NOTABLE * whole_ms:
            yield f"{line}: {units.milliseconds(excess[line] * MS / steps)} more a step"
