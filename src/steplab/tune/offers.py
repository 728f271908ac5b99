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
from steplab.techniques.situation import Objective, Situation
from steplab.tune.ceilings import Ceiling, ceiling, serves

# Seconds that a candidate is expected to take: a process, its gate and its turns, and what
# compiling the step adds. They only decide which of two ceilings is looked at first.
PLAIN_SECONDS = 10.0
DISCOUNT = 0.25  # a compiled candidate comes first if its ceiling is 1.4 times as high
SLOW_SECONDS = 40.0


@dataclass(frozen=True)
class Proposal:
    """One technique changed: the whole recipe that is tried, and what it can gain at most."""

    technique: str
    change: Settings  # settings that differ from those of the recipe below
    recipe: Recipe
    ceiling: Ceiling | None
    clash: str = ""  # why the recipe cannot be, as data

    @property
    def key(self) -> str:
        """The same for the same change on any recipe."""
        return change_label(self.technique, self.change, self.recipe)

    @property
    def promise(self) -> float:
        """Ceiling, discounted by the time that trying it will take; unknown promises nothing."""
        share = self.ceiling.share if self.ceiling else 0.0
        seconds = SLOW_SECONDS if is_slow(self.recipe) else PLAIN_SECONDS
        return share / seconds**DISCOUNT


def proposals(
    run: Run,
    objective: Objective,
    known: Mapping[str, float],
    first_impls: Mapping[str, str] | None = None,
) -> list[Proposal]:
    """Return what the shelf offers for the step of `run`.

    `known` has ms of parts of the step that the Run does not tell, `first_impls` what ran for
    each op in the baseline.
    """
    now = Situation(run, objective, impls_of(run), first_impls or {})
    found = []
    for name in shelf.names("steplab.techniques", "TECHNIQUE"):
        own = now.recipe.techniques.get(name, {})
        for offer in technique(name).offers(now, own):
            if not serves(offer.relief, objective):
                continue
            recipe = Recipe({**now.recipe.techniques, name: dict(offer.settings)})
            change = {k: v for k, v in offer.settings.items() if own.get(k) != v}
            limit = ceiling(offer.relief, run, known, objective)
            found.append(Proposal(name, change, recipe, limit, conflict(recipe)))
    return found


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
