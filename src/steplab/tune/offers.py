"""Proposals: what the techniques on the shelf offer for a step, with a ceiling each. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from steplab import shelf
from steplab.errors import UserError
from steplab.record import Run
from steplab.record.ladder import change_label
from steplab.spec import Recipe
from steplab.spec.recipe import Settings
from steplab.techniques.parse import check_recipe, technique
from steplab.techniques.situation import Offer, Situation
from steplab.tune.ceilings import WORTH, Ceiling, ceiling, serves

# Seconds that a candidate is expected to take: a process, its gate and its turns, and what
# compiling the step adds. They only decide which of two ceilings is looked at first: a compiled
# candidate if its ceiling is three times as high, for all that come after it are compiled, too.
PLAIN_SECONDS = 10.0
SLOW_SECONDS = 30.0


@dataclass(frozen=True)
class Proposal:
    """One technique changed: the whole recipe that is tried, and what it can gain at most."""

    technique: str
    change: Settings  # settings that differ from those of the recipe below
    recipe: Recipe
    ceiling: Ceiling | None
    clash: str = ""  # why the recipe cannot be
    odds: float = 1.0
    trouble: float = 1.0
    along: tuple[str, ...] = ()  # other techniques that had to change too

    @property
    def key(self) -> str:
        """The same for the same change on any recipe."""
        return change_label(self.technique, self.change, self.recipe, self.along)

    @property
    def promise(self) -> float:
        """Ceiling per second that trying it will take; an unknown one is as low as may be."""
        share = self.ceiling.share if self.ceiling else WORTH
        seconds = SLOW_SECONDS if is_slow(self.recipe) else PLAIN_SECONDS
        return self.odds * share / seconds


def proposals(now: Situation, known: Mapping[str, float]) -> list[Proposal]:
    """Return what the shelf offers for a step; `known` has ms of parts that its Run does not tell.

    Of two offers that change the same to the same the first counts.
    """
    found: dict[str, Proposal] = {}
    for name in shelf.names("steplab.techniques", "TECHNIQUE"):
        for offer in technique(name).offers(now, now.recipe.techniques.get(name, {})):
            if serves(offer.relief, now.objective):
                proposal = _proposal(name, offer, now, known)
                found.setdefault(proposal.key, proposal)
    return list(found.values())


def _proposal(name: str, offer: Offer, now: Situation, known: Mapping[str, float]) -> Proposal:
    before = now.recipe.techniques
    changed = {name: dict(offer.settings), **{n: dict(s) for n, s in offer.along.items()}}
    recipe = Recipe({**before, **changed})
    own = before.get(name, {})
    change = {k: v for k, v in offer.settings.items() if own.get(k) != v}
    limit = ceiling(offer.relief, now.run, known, now.objective)
    along = tuple(other for other in offer.along if before.get(other) != changed[other])
    clash = offer.refusal or conflict(recipe)
    return Proposal(name, change, recipe, limit, clash, offer.odds, offer.trouble, along)


def impls_of(run: Run) -> dict[str, str]:
    """Return the implementation that ran for each op of the model."""
    impls = run.ran.impls if run.ran else {}
    return {op: "/".join(names) for op, names in impls.items()}


def is_slow(recipe: Recipe) -> bool:
    """Whether the recipe's first step takes far longer than the others."""
    return any(technique(name).slow_start for name in recipe.techniques)


def conflict(recipe: Recipe) -> str:
    """Return why the techniques of a recipe cannot be used together, or ""."""
    try:
        check_recipe(recipe)
    except UserError as error:
        return error.message
    return ""
