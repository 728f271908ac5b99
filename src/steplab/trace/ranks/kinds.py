"""Collectives by kind: how many, how large, how fast, and how much of them nothing hides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from steplab.trace.analysis import Floats
from steplab.trace.collectives import KIND_NAMES, Collectives, bus_bandwidth
from steplab.trace.events import Ints
from steplab.trace.ranks.clocks import Clocks
from steplab.trace.ranks.matching import Matches
from steplab.trace.ranks.rank_trace import RankTrace
from steplab.trace.ranks.waits import MS, Waits

BRIEF = 64 << 10  # bytes: the time of a smaller message is its latency, over any link


@dataclass(frozen=True)
class Kind:
    """All collectives of one kind in groups of one size and purpose, per step and rank."""

    kind: str
    size: int  # ranks of the group, 0: unknown
    group: str  # what it is for, "mesh_tp"; "": not recorded
    count: float  # per step
    bytes: float | None  # of one message, the median; None: not recorded
    transfer_ms: float  # per step, from the last arrival to the end, hidden or not
    waiting_ms: float | None  # per step, before the last arrival, hidden or not; None: unknown
    exposed_ms: float  # per step, of the transfer what nothing hides
    exposed: float  # share of transfer and waiting that nothing hides
    least_ms: float  # what one takes at least: a tenth of the transfers are shorter
    brief: float  # per step, messages of less than BRIEF bytes
    brief_ms: float  # per step, of their transfer what nothing hides
    bus_bytes_per_s: float | None  # median over the collectives, while they are known to transfer


def kinds_of(
    ranks: Sequence[RankTrace], matches: Matches, clocks: Clocks, waits: Waits
) -> tuple[Kind, ...]:
    """Return a row per kind, size and purpose of group, the most time first."""
    known = np.isfinite(waits.arrived)
    arrived = np.where(known, waits.arrived, 0).astype(np.int64) + waits.origin
    purposes = sorted({text for rank in ranks for text in rank.collectives.purposes})
    parts = []
    for place, rank in enumerate(ranks):
        rows = matches.row[:, place]
        shared = known & (rows >= 0)
        begun = (arrived + clocks.ahead[place])[shared]  # on the clock of this rank
        parts.append(_columns(rank, rows[shared], begun, waits, purposes))
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    keys = np.stack(columns[:3], axis=1).astype(np.int64)
    per_step = max(len(ranks) * len(waits.steps), 1)
    found = []
    for key in np.unique(keys, axis=0):
        alike = (keys == key).all(axis=1)
        kind, size, purpose = key.tolist()
        chosen = [column[alike] for column in columns[3:]]
        one = _kind(KIND_NAMES[kind], size, purposes[purpose], chosen, per_step)
        untold = replace(one, waiting_ms=None, bus_bytes_per_s=None)
        found.append(one if waits.known else untold)
    return tuple(sorted(found, key=lambda one: -(one.transfer_ms + (one.waiting_ms or 0.0))))


def _columns(
    rank: RankTrace, rows: Ints, begun: Ints, waits: Waits, purposes: Sequence[str]
) -> tuple[NDArray[np.generic], ...]:
    """Return kind, size, purpose of the group, bytes, ns of each transfer; and ns of which several
    at a time count once: in all, of transfer, and of both what nothing hides.

    `rows` are those of matched collectives, whose last rank came when they had `begun`.
    """
    own = rank.collectives
    moves = own.start.copy()
    moves[rows] = np.clip(begun, own.start[rows], own.end[rows])
    chosen = np.isin(own.step, waits.steps)
    began, moved = (_after_others(own, start) for start in (own.start, moves))
    place = np.array([purposes.index(text) for text in own.purposes], np.int64)
    columns = (
        own.kind,
        own.size,
        place[own.purpose],
        own.bytes,
        own.end - moves,
        own.end - began,
        own.end - moved,
        rank.exposed.within(began, own.end),
        rank.exposed.within(moved, own.end),
    )
    return tuple(column[chosen] for column in columns)


def _after_others(own: Collectives, start: Ints) -> Ints:
    """Return `start`, or where those of the kind that began earlier have ended; at most its end."""
    after = np.minimum(start, own.end)
    for kind in np.unique(own.kind):
        rows = np.flatnonzero(own.kind == kind)
        rows = rows[np.argsort(start[rows], kind="stable")]
        ended = np.maximum.accumulate(own.end[rows])[:-1]
        after[rows[1:]] = np.clip(ended, start[rows[1:]], own.end[rows[1:]])
    return after


def _kind(name: str, size: int, group: str, columns: Sequence[Floats], per_step: int) -> Kind:
    sizes, each, whole, moved, shown, shown_moving = columns
    speeds = [
        bus_bandwidth(name, size, message, ns)
        for message, ns in zip(sizes.tolist(), each.tolist(), strict=True)
    ]
    known = [speed for speed in speeds if np.isfinite(speed)]
    return Kind(
        kind=name,
        size=size,
        group=group,
        count=len(sizes) / per_step,
        bytes=float(np.nanmedian(sizes)) if np.isfinite(sizes).any() else None,
        transfer_ms=float(moved.sum()) / per_step * MS,
        waiting_ms=float((whole - moved).sum()) / per_step * MS,
        exposed_ms=float(shown_moving.sum()) / per_step * MS,
        exposed=float(shown.sum() / whole.sum()) if whole.sum() else 0.0,
        least_ms=float(np.quantile(each, 0.1)) * MS,
        brief=float((sizes < BRIEF).sum()) / per_step,
        brief_ms=float(shown_moving[sizes < BRIEF].sum()) / per_step * MS,
        bus_bytes_per_s=float(np.median(known)) if known else None,
    )
