"""Who waited for whom: communication that nothing hides, split into waiting and transfer.

A collective can move data only when its last rank has come. What a rank spends in it before that is
waiting for that rank; the rest is transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steplab.trace.analysis import Floats
from steplab.trace.collectives import KIND_NAMES
from steplab.trace.events import Ints
from steplab.trace.ranks.clocks import Clocks
from steplab.trace.ranks.matching import Matches
from steplab.trace.ranks.rank_trace import RankTrace
from steplab.trace.spans import EMPTY, Intervals, union
from steplab.trace.windows import borders

MS = 1e-6  # per ns
# Whose ranks may come and go in pairs, of which the trace does not say who belongs together.
PAIRS = ("send", "receive", "send and receive")


@dataclass(frozen=True)
class Waits:
    """Times in ms of every step that all ranks have, in the order of `steps` and of the ranks."""

    steps: tuple[int, ...]  # numbers
    waiting: Floats  # (waiting rank, rank waited for, step), not hidden
    transfer: Floats  # (rank, step), not hidden
    last: Ints  # (matched collectives): place of the rank that came last, -1: pairs
    arrived: Floats  # (matched collectives): when, ns since `origin` on the first rank's clock
    origin: int

    @property
    def known(self) -> bool:
        """Whether ranks were seen in the same collectives: else all that is exposed is transfer."""
        return bool(len(self.last) and self.steps)

    def delay(self, place: int) -> Floats:
        """Return by step how long the others waited for a rank: the median of those that did."""
        others = np.delete(self.waiting[:, place], place, axis=0)
        waited = others[others.sum(axis=1) > 0]
        return np.median(waited, axis=0) if len(waited) else np.zeros(len(self.steps))


def find_waits(ranks: Sequence[RankTrace], matches: Matches, clocks: Clocks) -> Waits:
    """Split the exposed communication of every rank and step."""
    steps = shared_steps(ranks)
    origin = min((rank.windows[0].start for rank in ranks), default=0)
    start = matches.times(ranks, "start", origin) - clocks.ahead
    end = matches.times(ranks, "end", origin) - clocks.ahead
    in_pairs = np.isin(matches.kind, [KIND_NAMES.index(name) for name in PAIRS])
    last = np.full(len(matches), -1, np.int64)
    arrived = np.full(len(matches), np.nan)
    if len(matches):
        last = np.where(in_pairs, -1, np.nanargmax(start, axis=1))
        arrived = np.nanmax(start, axis=1)
    waiting = np.zeros((len(ranks), len(ranks), len(steps)))
    transfer = np.zeros((len(ranks), len(steps)))
    for place, rank in enumerate(ranks):
        low, high = _borders(rank, steps)
        taken = EMPTY
        for other in _most_waited_for(last, len(ranks)):
            rows = (last == other) & np.isfinite(start[:, place]) if other != place else []
            if not np.any(rows):
                continue
            until = np.minimum(arrived[rows], end[rows, place])
            waits = _on_clock(start[rows, place], until, origin + int(clocks.ahead[place]))
            waits = (waits & rank.exposed) - taken
            waiting[place, other] = waits.within(low, high) * MS
            taken = taken | waits
        transfer[place] = (rank.exposed - taken).within(low, high) * MS
    return Waits(steps, waiting, transfer, last, arrived, origin)


def shared_steps(ranks: Sequence[RankTrace]) -> tuple[int, ...]:
    """Return the numbers of the steps that all ranks recorded whole."""
    numbers = [{step.number for step in rank.budget.steps} for rank in ranks]
    return tuple(sorted(set.intersection(*numbers))) if numbers else ()


def _borders(rank: RankTrace, steps: Sequence[int]) -> tuple[Ints, Ints]:
    windows = {window.number: window for window in rank.windows}
    return borders([windows[number] for number in steps])


def _most_waited_for(last: Ints, ranks: int) -> list[int]:
    """Return the ranks, the one that was last most often first."""
    counts = np.bincount(last[last >= 0], minlength=ranks)
    return [int(place) for place in np.argsort(-counts, kind="stable") if counts[place]]


def _on_clock(start: Floats, end: Floats, origin: int) -> Intervals:
    """Return intervals on a rank's own clock of times since the common origin."""
    return union(np.rint(start).astype(np.int64) + origin, np.rint(end).astype(np.int64) + origin)
