"""Which collectives of several ranks are one and the same, and where the ranks disagree on that.

Where the trace numbers the collectives of a group, the numbers match. Else the n-th of its kind in
a step is the n-th of that kind in the same step of every other rank of the group.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from steplab.core import units
from steplab.core.input_file import check_memory
from steplab.trace.analysis import Floats
from steplab.trace.collectives import KIND_NAMES, Called, Collectives
from steplab.trace.events import Codes, Ints
from steplab.trace.ranks.rank_trace import RankTrace

Key = tuple[object, ...]
CELL = 64  # bytes for each collective and rank: its row, and times in several tables


@dataclass(frozen=True)
class Matches:
    """One row per collective in which two ranks or more were seen; columns are ranks, in order."""

    row: Ints  # (collectives, ranks): its row in the Collectives of the rank, -1: not seen there
    kind: Codes  # index in KIND_NAMES
    unmatched: int  # collectives that were seen on one rank only

    def __len__(self) -> int:
        return len(self.row)

    def none(self) -> Matches:
        """Return the same ranks without a collective that is known to be one and the same."""
        return replace(self, row=self.row[:0], kind=self.kind[:0])

    @property
    def seen(self) -> NDArray[np.bool_]:
        """(collectives, ranks): which ranks took part."""
        return self.row >= 0

    def times(self, ranks: Sequence[RankTrace], column: str, origin: int) -> Floats:
        """Return (collectives, ranks) ns since `origin` of "start" or "end", nan where not seen."""
        found = np.full(self.row.shape, np.nan)
        for place, rank in enumerate(ranks):
            here = self.row[:, place]
            values = getattr(rank.collectives, column) - origin
            found[here >= 0, place] = values[here[here >= 0]]
        return found


def match_collectives(ranks: Sequence[RankTrace]) -> Matches:
    """Match the collectives of all ranks; `ranks` are in the order of their numbers."""
    found: dict[Key, dict[int, int]] = defaultdict(dict)
    for place, rank in enumerate(ranks):
        for row, key in enumerate(_keys(rank.collectives)):
            found[key].setdefault(place, row)
    shared = [places for places in found.values() if len(places) > 1]
    check_memory(CELL * len(shared) * len(ranks), f"Matching {len(ranks)} ranks")
    rows = np.full((len(shared), len(ranks)), -1, np.int64)
    for number, places in enumerate(shared):
        rows[number, list(places)] = list(places.values())
    kinds = [ranks[place].collectives.kind[row] for one in shared for place, row in _first(one)]
    # In the order in which the first rank that took part began them.
    starts = [ranks[place].collectives.start[row] for one in shared for place, row in _first(one)]
    order = np.argsort(np.array(starts, np.int64), kind="stable")
    kind = np.array(kinds, np.int32)
    return Matches(rows[order], kind[order], len(found) - len(shared))


def _first(places: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    yield min(places.items())


def _keys(collectives: Collectives) -> Iterator[Key]:
    """Yield what all ranks call a collective alike."""
    counts: Counter[Key] = Counter()
    columns = (collectives.group, collectives.sequence, collectives.step, collectives.kind)
    for group, sequence, step, kind in zip(*(c.tolist() for c in columns), strict=True):
        name = collectives.groups[group]
        if sequence >= 0 and name:
            yield name, sequence, kind
        else:
            place: Key = (name, step, kind)
            counts[place] += 1
            yield (*place, counts[place])


@dataclass(frozen=True)
class Disorder:
    """The first collective of a step that not all ranks of a group call."""

    step: int
    group: str  # "": the trace does not name groups
    position: int  # in the step, from 1
    calls: Mapping[int, str]  # rank -> what it calls there

    @property
    def sentence(self) -> str:
        """Who calls what."""
        told = ", ".join(f"rank {rank} calls {what}" for rank, what in self.calls.items())
        return f"step {self.step}, collective {self.position}{_of(self.group)}: {told}"


def _of(group: str) -> str:
    return f" of group {group}" if group else ""


def find_disorder(ranks: Sequence[RankTrace]) -> tuple[Disorder, ...]:
    """Return where ranks of one group call other collectives, the first of each step.

    Ranks of groups that are not named may belong to several, and a recording without steps may
    begin anywhere: only another order of the same calls is told then.
    """
    found: list[Disorder] = []
    is_marked = all(rank.budget.marked for rank in ranks)
    numbers = [rank.place.rank or 0 for rank in ranks]
    orders = [_orders(rank.called) for rank in ranks]
    for step, group in sorted(set().union(*orders)):
        there = {n: order[step, group] for n, order in zip(numbers, orders, strict=True)
                 if (step, group) in order}  # fmt: skip
        if len(there) < 2 or len(set(there.values())) == 1:
            continue
        unsure = not is_marked or (not group and any(rank.place.groups != 1 for rank in ranks))
        if unsure and len({tuple(sorted(calls)) for calls in there.values()}) > 1:
            continue
        found.append(_first_difference(step, group, there))
    return tuple(found)


Call = tuple[str, int]  # kind, bytes; -1: unknown, or may differ from rank to rank


def _orders(called: Called) -> dict[tuple[int, str], tuple[Call, ...]]:
    """Return what was called in every step and group, in order."""
    found: dict[tuple[int, str], list[Call]] = defaultdict(list)
    columns = (called.step, called.group, called.kind, called.bytes)
    for step, group, kind, size in zip(*(column.tolist() for column in columns), strict=True):
        if step >= 0:
            found[step, called.groups[group]].append((KIND_NAMES[kind], size))
    return {key: tuple(calls) for key, calls in found.items()}


def _first_difference(step: int, group: str, there: Mapping[int, Sequence[Call]]) -> Disorder:
    position = next(i for i in range(max(map(len, there.values())))
                    if len({_at(calls, i) for calls in there.values()}) > 1)  # fmt: skip
    calls = {rank: _words(_at(calls, position)) for rank, calls in there.items()}
    return Disorder(step, group, position + 1, calls)


def _at(calls: Sequence[Call], position: int) -> Call | None:
    return calls[position] if position < len(calls) else None


def _words(call: Call | None) -> str:
    if call is None:
        return "nothing more"
    kind, size = call
    return kind if size < 0 else f"{kind} of {units.bytes_(size)}"
