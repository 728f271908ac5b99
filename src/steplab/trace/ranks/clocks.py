"""One clock for all ranks, by the ends of the collectives that nobody leaves before all came.

Machines differ by up to milliseconds, which is as long as a wait. A meeting ends everywhere at
nearly the same time, so the median difference of its ends is the difference of the clocks. Ranks of
one machine share its clock; they are moved only if a meeting would have ended before it began.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steplab.trace.analysis import Floats
from steplab.trace.collectives import KIND_NAMES, MEETINGS
from steplab.trace.events import Ints
from steplab.trace.ranks.matching import Matches
from steplab.trace.ranks.rank_trace import RankTrace

TOLERANCE = 50_000  # ns by which a rank may leave before the last one is seen to come
IMPOSSIBLE = 0.02  # of the meetings of one machine: more, and its traces do not share a clock
# Of the meetings on clocks that are set: with more, the files are not of one moment, they lack
# events, or collectives of several groups were taken for one.
UNSURE = 0.1
LEAST = 12  # meetings from which a drift can be told


@dataclass(frozen=True)
class Clocks:
    """How far the clock of every rank is ahead, in the order of the ranks."""

    ahead: Ints  # ns; 0 for the first rank
    drift: Floats  # ns per s by which that grows; nan: too few meetings to tell
    impossible: float  # share of the meetings that a rank left before the last came, corrected
    note: str


def align_clocks(ranks: Sequence[RankTrace], matches: Matches) -> Clocks:
    """Return the clocks of all ranks relative to the first."""
    meetings = np.isin(matches.kind, [KIND_NAMES.index(name) for name in MEETINGS])
    origin = min((rank.windows[0].start for rank in ranks), default=0)
    start, end = (matches.times(ranks, column, origin)[meetings] for column in ("start", "end"))
    unmoved = np.zeros(len(ranks), np.int64)
    hosts = {rank.place.host for rank in ranks}
    share = _impossible(start, end)
    if len(hosts) == 1 and "" not in hosts and share <= IMPOSSIBLE:
        return Clocks(unmoved, np.zeros(len(ranks)), share, "one machine, one clock")
    unknown = np.full(len(ranks), np.nan)
    if not len(start):
        return Clocks(unmoved, unknown, 0.0, "no collective to set the clocks by")
    with np.errstate(invalid="ignore"):
        lag = end - np.nanmedian(end, axis=1, keepdims=True)
    ahead = np.array([_median(column) for column in lag.T])
    drift = np.array([_slope(end[:, 0], column) for column in (lag - lag[:, :1]).T])
    ahead -= ahead[0]
    moved = _impossible(start - ahead, end - ahead)
    if moved > UNSURE:
        return Clocks(unmoved, unknown, moved, "no clock fits the collectives")
    note = f"clocks set by the ends of {len(start):,} collectives"
    return Clocks(np.rint(ahead).astype(np.int64), drift, moved, note)


def _impossible(start: Floats, end: Floats) -> float:
    """Return the share of the meetings that some rank left before the last one had come."""
    if not len(start):
        return 0.0
    early = np.nanmin(end, axis=1) + TOLERANCE < np.nanmax(start, axis=1)
    return float(early.mean())


def _median(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else 0.0


def _slope(time: Floats, lag: Floats) -> float:
    """Return ns per s by which a lag grows from the first third of the meetings to the last."""
    known = np.isfinite(time) & np.isfinite(lag)
    if known.sum() < LEAST:
        return float("nan")
    time, lag = time[known], lag[known]
    third = len(time) // 3
    span = float(np.median(time[-third:]) - np.median(time[:third]))
    grown = float(np.median(lag[-third:]) - np.median(lag[:third]))
    return grown / (span * 1e-9) if span > 0 else float("nan")
