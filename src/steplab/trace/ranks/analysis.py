"""RanksAnalysis: the traces of several ranks as one: a budget, collectives, ranks, who is late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from steplab.core import Budget, StepBudget
from steplab.core.budget import TERMS
from steplab.core.units import counted
from steplab.hardware.links import Link, usual_link
from steplab.trace.ranks.clocks import UNSURE, Clocks, align_clocks
from steplab.trace.ranks.kinds import Kind, kinds_of
from steplab.trace.ranks.late import LateRank, find_late_rank, rank_number
from steplab.trace.ranks.matching import Disorder, Matches, find_disorder, match_collectives
from steplab.trace.ranks.rank_trace import RankTrace
from steplab.trace.ranks.waits import Waits, find_waits

TRANSFER = "transfer"
LISTED = 8  # missing ranks named in a sentence
MOST_MISSING = 1_000  # a file may claim to be of any number of ranks
NO_STEP = "the ranks have no step in common: nothing can be said of their waits"


@dataclass(frozen=True)
class RankRow:
    """One rank, in ms per step; the median of the steps that all ranks have."""

    rank: int
    host: str
    file: str
    step_ms: float
    computing_ms: float  # kernels, or operators without a device
    transfer_ms: float  # exposed, with what is waiting where that cannot be told
    waiting_ms: float | None  # exposed, for any other rank; None: cannot be told
    waited_for_ms: float | None  # by the others
    overlap: float | None  # share of the communication of the steps that computing hides
    clock_ahead_us: float


@dataclass(frozen=True)
class RanksAnalysis:
    """Several ranks of one step."""

    ranks: tuple[RankTrace, ...]  # in the order of their numbers
    size: int  # of the whole group, as the traces tell it
    missing: tuple[int, ...]  # ranks of the group that have no trace here, the first MOST_MISSING
    matches: Matches
    clocks: Clocks
    waits: Waits
    budget: Budget  # of every step the mean of the ranks, so that its terms still add up
    split: Mapping[int, Mapping[str, float]]  # step -> parts of its term `communication`, in ms
    kinds: tuple[Kind, ...]
    link: Link | None  # that the ranks are connected by, where they are on one machine
    rows: tuple[RankRow, ...]
    late: LateRank | None
    disorder: tuple[Disorder, ...]
    notes: tuple[str, ...]

    @property
    def tells_waits(self) -> bool:
        """Whether waiting is told from transfer: ranks were seen in the same collectives."""
        return self.waits.known

    @property
    def missing_sentence(self) -> str:
        """Say which ranks have no trace; "" if none is missing."""
        lacking = self.size - len(self.ranks)
        if not lacking:
            return ""
        more = ", ..." if lacking > LISTED else ""
        named = ", ".join(map(str, self.missing[:LISTED]))
        return f"{counted(lacking, 'rank')} without a trace here: {named}{more}"

    @property
    def record(self) -> RanksRecord:
        """What `explain --json` writes of it."""
        typical = self.budget.typical
        return RanksRecord(
            [row.rank for row in self.rows],
            self.size,
            self.missing,
            self.clocks.note,
            typical.wall_ms,
            typical.terms,
            typical.residual_ms,
            self.split[typical.number] if self.tells_waits else {},
            self.kinds,
            self.link.name if self.link else None,
            self.rows,
            self.late,
            self.disorder,
            self.notes,
        )


@dataclass(frozen=True)
class RanksRecord:
    """The ranks as JSON: milliseconds are per step, of the typical one."""

    ranks: Sequence[int]
    size: int  # of the whole group
    missing: Sequence[int]  # of at most a thousand
    clocks: str
    step_ms: float
    terms: Mapping[str, float]
    residual_ms: float
    communication: Mapping[str, float]  # empty: waiting cannot be told from transfer
    collectives: Sequence[Kind]
    link: str | None
    by_rank: Sequence[RankRow]
    late: LateRank | None
    disorder: Sequence[Disorder]
    notes: Sequence[str]


def analyze_ranks(ranks: Sequence[RankTrace], notes: Sequence[str] = ()) -> RanksAnalysis:
    """Put the traces of all ranks on one clock and tell what each waited for.

    `notes` are what is known of the files; the ranks may come in any order.
    """
    ordered = tuple(sorted(ranks, key=lambda rank: rank.place.rank or 0))
    numbers = [rank_number(rank, place) for place, rank in enumerate(ordered)]
    size = max(max((rank.place.ranks or 0 for rank in ordered), default=0), len(ordered))
    here = set(numbers)
    missing = tuple(islice((rank for rank in range(size) if rank not in here), MOST_MISSING))
    matches = match_collectives(ordered)
    clocks = align_clocks(ordered, matches)
    if clocks.impossible > UNSURE:
        matches = matches.none()
    waits = find_waits(ordered, matches, clocks)
    budget, split = _budget(ordered, waits, numbers)
    return RanksAnalysis(
        ranks=ordered,
        size=size,
        missing=missing,
        matches=matches,
        clocks=clocks,
        waits=waits,
        budget=budget,
        split=split,
        kinds=kinds_of(ordered, matches, clocks, waits),
        link=_link(ordered),
        rows=tuple(_rows(ordered, numbers, clocks, waits)),
        late=find_late_rank(ordered, waits),
        disorder=find_disorder(ordered),
        notes=(*notes, *_notes(ordered, matches, clocks, waits)),
    )


def _link(ranks: Sequence[RankTrace]) -> Link | None:
    """Return what connects cards like these in one machine; None: several, or unknown ones."""
    hosts, cards = {rank.place.host for rank in ranks}, {rank.card for rank in ranks}
    if len(hosts) > 1 or len(cards) > 1 or "" in hosts | cards:
        return None
    return usual_link(cards.pop())


def _budget(
    ranks: Sequence[RankTrace], waits: Waits, numbers: Sequence[int]
) -> tuple[Budget, dict[int, dict[str, float]]]:
    """Return the mean of the ranks' budgets step by step, and the parts of its communication."""
    if not waits.steps:
        own = ranks[0].budget
        return own, {s.number: {TRANSFER: s.terms["communication"]} for s in own.steps}
    by_number = [{step.number: step for step in rank.budget.steps} for rank in ranks]
    steps, split = [], {}
    for index, number in enumerate(waits.steps):
        there = [steps_of[number] for steps_of in by_number]
        terms = {term: float(np.mean([s.terms.get(term, 0.0) for s in there])) for term in TERMS}
        steps.append(StepBudget(number, float(np.mean([s.wall_ms for s in there])), terms))
        parts = {TRANSFER: float(waits.transfer[:, index].mean())}
        for place in np.argsort(-waits.waiting.sum(axis=(0, 2)), kind="stable").tolist():
            ms = float(waits.waiting[:, place, index].mean())
            if ms > 0:
                parts[f"waiting for rank {numbers[place]}"] = ms
        split[number] = parts
    first = ranks[0].budget
    return replace(first, steps=tuple(steps), notes=(), peaks={}), split


def _rows(
    ranks: Sequence[RankTrace], numbers: Sequence[int], clocks: Clocks, waits: Waits
) -> list[RankRow]:
    def middle(values: object) -> float:
        array = np.asarray(values, np.float64)
        return float(np.median(array)) if array.size else 0.0

    rows = []
    for place, rank in enumerate(ranks):
        steps = [s for s in rank.budget.steps if s.number in set(waits.steps)] or rank.budget.steps
        rows.append(
            RankRow(
                rank=numbers[place],
                host=rank.place.host,
                file=rank.file,
                step_ms=middle([step.wall_ms for step in steps]),
                computing_ms=middle([step.terms.get("kernels", 0.0) for step in steps]),
                transfer_ms=middle(waits.transfer[place]),
                waiting_ms=middle(waits.waiting[place].sum(axis=0)) if waits.known else None,
                waited_for_ms=middle(waits.delay(place)) if waits.known else None,
                overlap=rank.overlap,
                clock_ahead_us=float(clocks.ahead[place]) / 1e3,
            )
        )
    return rows


def _notes(ranks: Sequence[RankTrace], matches: Matches, clocks: Clocks, waits: Waits) -> list[str]:
    if len(ranks) == 1:
        return [f"{ranks[0].file}: {omission}" for omission in ranks[0].omissions]
    notes = [clocks.note]
    drifts = clocks.drift[np.isfinite(clocks.drift)]
    worst = float(np.abs(drifts).max()) if len(drifts) else 0.0
    if worst > 0:
        notes.append(f"clocks drift by up to {worst / 1e3:.1f} us a second, which is not corrected")
    if clocks.impossible:
        share = f"{clocks.impossible:.1%}"
        unsure = ": who waited for whom cannot be told" if clocks.impossible > UNSURE else ""
        notes.append(
            f"{share} of the collectives end on a rank before the last one has come{unsure}"
        )
    if matches.unmatched:
        notes.append(f"{matches.unmatched:,} collectives were seen on one rank only")
    if any("" in rank.collectives.groups and len(rank.collectives) for rank in ranks):
        notes.append("groups are not recorded: collectives match by kind and order in the step")
    if not waits.steps:
        notes.append(NO_STEP)
    for rank in ranks:
        notes += [f"{rank.file}: {omission}" for omission in rank.omissions]
    return notes
