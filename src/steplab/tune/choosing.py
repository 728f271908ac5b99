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
from steplab.tune.ceilings import WORTH
from steplab.tune.offers import Proposal, impls_of, proposals

GROWN = 1.5  # what lost is tried again when its ceiling's share has grown by this factor
# What promises less than this share of an offer for which there is no time waits for it: both are
# there for the next call.
FAR_LESS = 0.1
MOST_FAILURES = 2  # what could not run on one recipe may run on another, but not for ever


@dataclass(frozen=True)
class Choice:
    """The next offer; None where none is left, or none for which there is time."""

    best: Proposal | None
    not_worth: tuple[tuple[Proposal, str], ...]  # with the reason
    late: tuple[str, ...]  # worth it, but there is no time, or none for what is likelier to win


def choose(
    run: Run,
    waits: tuple[str, ...],
    known: Mapping[str, float],
    ladder: Ladder,
    in_time: Callable[[Recipe, float], bool],
) -> Choice:
    """Return what to try on top of the recipe of `run`, whose host `waits` in these lines.

    `known` has ms of parts of the step that the Run does not tell; `in_time` tells whether there is
    time for a recipe that takes so many times as long to try as usual.
    """
    here = run.spec.recipe
    failed = frozenset(r.label for r in ladder.rungs if r.outcome == "failed" and r.below == here)
    impls, first = impls_of(run), ladder.first_impls
    found = proposals(Situation(run, ladder.objective, impls, first, waits, failed), known)
    reasons = [(proposal, _against(proposal)) for proposal in found]
    open_ones = [p for p, reason in reasons if not reason and not _is_done(p, run, ladder)]
    ready = [proposal for proposal in open_ones if in_time(proposal.recipe, proposal.trouble)]
    late = [proposal for proposal in open_ones if proposal not in ready]
    not_worth = tuple((proposal, reason) for proposal, reason in reasons if reason)
    lost = Counter(_subject(rung) for rung in ladder.rungs if rung.outcome != "kept")

    def promise(proposal: Proposal) -> float:
        """Half for every offer that set the same thing otherwise and did not win."""
        return proposal.promise / 2 ** lost[_subject(proposal)]

    best = max(ready, key=promise, default=None)
    missed = max((promise(proposal) / proposal.trouble for proposal in late), default=0.0)
    if best is not None and promise(best) < FAR_LESS * missed:
        best, late = None, open_ones
    return Choice(best, not_worth, tuple(proposal.key for proposal in late))


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
