"""Which offer to try next: the most promising one that is worth it and fits the time. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from steplab import units
from steplab.record import Run
from steplab.record.ladder import Ladder, Rung
from steplab.spec import Recipe
from steplab.techniques.situation import Situation
from steplab.tune.offers import Proposal, impls_of, proposals

WORTH = 0.02  # a ceiling below this share of the step, or of its peak, is not worth a try
GROWN = 1.5  # what lost is tried again when its ceiling's share has grown by this factor
MOST_FAILURES = 2  # what could not run on one recipe may run on another, but not for ever


@dataclass(frozen=True)
class Choice:
    """The next offer; None where none is left, or none for which there is time."""

    best: Proposal | None
    not_worth: tuple[tuple[Proposal, str], ...]  # with the reason
    late: tuple[str, ...]  # worth it, but there is no time


def choose(
    run: Run,
    waits: tuple[str, ...],
    known: Mapping[str, float],
    ladder: Ladder,
    in_time: Callable[[Recipe], bool],
) -> Choice:
    """Return what to try on top of the recipe of `run`, whose host `waits` in these lines.

    `known` has ms of parts of the step that the Run does not tell.
    """
    here = run.spec.recipe
    failed = frozenset(r.label for r in ladder.rungs if r.outcome == "failed" and r.below == here)
    impls, first = impls_of(run), ladder.first_impls
    found = proposals(Situation(run, ladder.objective, impls, first, waits, failed), known)
    reasons = [(proposal, _against(proposal)) for proposal in found]
    open_ones = [p for p, reason in reasons if not reason and not _is_done(p, run, ladder)]
    ready = [proposal for proposal in open_ones if in_time(proposal.recipe)]
    late = tuple(proposal.key for proposal in open_ones if proposal not in ready)
    not_worth = tuple((proposal, reason) for proposal, reason in reasons if reason)
    return Choice(_most_promising(ready, ladder), not_worth, late)


def _most_promising(ready: list[Proposal], ladder: Ladder) -> Proposal | None:
    """An offer counts half for every one that set the same thing otherwise and did not win."""
    lost = Counter(_subject(rung) for rung in ladder.rungs if rung.outcome != "kept")
    return max(ready, key=lambda p: p.promise / 2 ** lost[_subject(p)], default=None)


def _subject(offer: Proposal | Rung) -> tuple[str, ...]:
    """What an offer sets: the technique, and the names of the settings it changes."""
    return (offer.technique, *offer.change)


def _against(proposal: Proposal) -> str:
    """Return why an offer is not worth a try, or ""."""
    if proposal.clash:
        return proposal.clash
    limit = proposal.ceiling
    if limit is not None and limit.share < WORTH:
        return f"can gain at most {units.percent(limit.share)} ({limit.parts or 'nothing'})"
    return ""


def _is_done(proposal: Proposal, run: Run, ladder: Ladder) -> bool:
    """Whether an offer has been tried, and nothing has changed that would let it win now."""
    here = run.spec.recipe
    if any(u.label == proposal.key and u.refused_on == here.label for u in ladder.untried):
        return True
    before = [rung for rung in ladder.rungs if rung.change and rung.label == proposal.key]
    if not before:
        return False
    last, limit = before[-1], proposal.ceiling
    if last.below == here:
        return True
    if last.outcome == "failed":
        return len(before) >= MOST_FAILURES
    if (
        last.outcome not in ("no gain", "cannot tell")
        or limit is None
        or last.ceiling_share is None
    ):
        return True
    return limit.share < GROWN * last.ceiling_share
