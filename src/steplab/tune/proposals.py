"""What the techniques suggest for a step, and which suggestion to try next. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from steplab.core import Recipe, Run, Settings, registry, units
from steplab.core.errors import UserError
from steplab.core.ladder import Ladder, Rung, change_label
from steplab.techniques.context import Savings, StepContext, Suggestion
from steplab.techniques.recipes import check_recipe, technique
from steplab.techniques.technique import Stage
from steplab.tune.ceilings import MIN_SHARE, Ceiling, ceiling, serves

# Seconds that a candidate is expected to take, without and with compilation: a process, its gate
# and its turns. They only decide which of two is tried first: a compiled candidate where its
# ceiling is three times as high, since all that come after it are compiled, too.
PLAIN_SECONDS = 10.0
SLOW_SECONDS = 30.0
GROWN = 1.5  # what lost is tried again when its ceiling's share has grown by this factor
# A suggestion that promises less than this share of another, for which there is no time left, is
# not tried before it: both are there for the next call.
FAR_LESS = 0.1
BESIDE_MODEL = (Stage.OPTIMIZER, Stage.DATA)  # stages that leave the model as it is
MAX_FAILURES = 2  # what could not run on one recipe may run on another, but not for ever


@dataclass(frozen=True)
class Proposal:
    """One technique changed: the whole recipe that is tried, and what it can gain at most."""

    technique: str
    change: Settings  # settings that differ from those of the recipe below
    recipe: Recipe
    ceiling: Ceiling | None
    conflict: str = ""  # why the recipe is not possible
    prior: float = 1.0
    effort: float = 1.0
    requires: tuple[str, ...] = ()  # other techniques that had to change too

    @property
    def key(self) -> str:
        """The same for the same change on any recipe."""
        return change_label(self.technique, self.change, self.recipe, self.requires)

    @property
    def promise(self) -> float:
        """Ceiling per second that trying it will take; an unknown one counts as MIN_SHARE."""
        share = self.ceiling.share if self.ceiling else MIN_SHARE
        seconds = SLOW_SECONDS if is_slow(self.recipe) else PLAIN_SECONDS
        return self.prior * share / seconds


def proposals(context: StepContext, known: Mapping[str, float]) -> list[Proposal]:
    """Return what the techniques suggest; `known` has ms of parts that the Run does not tell.

    Of two suggestions that make the same change, the first counts.
    """
    return _suggested(context, known, lambda savings: serves(savings, context.objective))


def memory_savers(context: StepContext) -> list[Proposal]:
    """Return what saves memory and nothing else: it costs time, so only a larger batch pays it."""

    def is_memory_only(savings: Savings) -> bool:
        return bool(savings) and all(part.startswith("memory:") for part in savings)

    return [one for one in _suggested(context, {}, is_memory_only) if not one.conflict]


def _suggested(
    context: StepContext, known: Mapping[str, float], wanted: Callable[[Savings], bool]
) -> list[Proposal]:
    found: dict[str, Proposal] = {}
    for name in registry.names("steplab.techniques", "TECHNIQUE"):
        for suggestion in technique(name).suggest(context, context.recipe.techniques.get(name, {})):
            if wanted(suggestion.savings):
                proposal = _proposal(name, suggestion, context, known)
                found.setdefault(proposal.key, proposal)
    return list(found.values())


def _proposal(
    name: str, suggestion: Suggestion, context: StepContext, known: Mapping[str, float]
) -> Proposal:
    before = context.recipe.techniques
    changed = {
        name: dict(suggestion.settings),
        **{n: dict(s) for n, s in suggestion.requires.items()},
    }
    recipe = Recipe({**before, **changed})
    own = before.get(name, {})
    change = {k: v for k, v in suggestion.settings.items() if own.get(k) != v}
    limit = ceiling(suggestion.savings, context.run, known, context.objective)
    if limit is not None:
        limit = replace(limit, parts=": ".join(filter(None, (limit.parts, suggestion.reason))))
    requires = tuple(other for other in suggestion.requires if before.get(other) != changed[other])
    conflict = suggestion.refusal or recipe_conflict(recipe)
    return Proposal(
        name, change, recipe, limit, conflict, suggestion.prior, suggestion.effort, requires
    )


def impls_of(run: Run) -> dict[str, str]:
    """Return the implementation that ran for each op of the model."""
    impls = run.ran.impls if run.ran else {}
    return {op: "/".join(names) for op, names in impls.items()}


def still_known(known: Mapping[str, float], before: Run, after: Run) -> dict[str, float]:
    """Return the times known of the step `before` that still apply to the step `after`.

    Those of an op that another implementation computes now do not.
    """
    had, has = impls_of(before), impls_of(after)
    changed = {op for op in had.keys() | has.keys() if had.get(op) != has.get(op)}
    gone = {f"{scheme}:{op}" for scheme in ("op", "idle") for op in changed}
    return {part: ms for part, ms in known.items() if part not in gone}


def is_slow(recipe: Recipe) -> bool:
    """Whether the recipe's first step takes far longer than the others."""
    return any(technique(name).slow_start for name in recipe.techniques)


def same_model(a: Recipe, b: Recipe) -> bool:
    """Whether two recipes run the same model: they differ in its update and its batches at most."""
    changed = {
        n for n in {*a.techniques, *b.techniques} if a.techniques.get(n) != b.techniques.get(n)
    }
    return all(technique(name).stage in BESIDE_MODEL for name in changed)


def recipe_conflict(recipe: Recipe) -> str:
    """Return why the techniques of a recipe cannot be used together, or ""."""
    try:
        check_recipe(recipe)
    except UserError as error:
        return error.message
    return ""


@dataclass(frozen=True)
class Choice:
    """The next suggestion; None where none is left, or none for which there is time."""

    best: Proposal | None
    others: tuple[Proposal, ...]  # for which there would be time as well
    not_worth: tuple[tuple[Proposal, str], ...]  # with the reason
    late: tuple[str, ...]  # worth it, but there is no time for them


def choose(
    run: Run,
    waits: tuple[str, ...],
    known: Mapping[str, float],
    ladder: Ladder,
    in_time: Callable[[Recipe, float], bool],
) -> Choice:
    """Return what to try on top of the recipe of `run`, whose host `waits` in these lines.

    `known` has ms of parts of the step that the Run does not tell. `in_time(recipe, effort)` tells
    whether there is time for a recipe that takes `effort` times as long to try as usual.
    """
    here = run.spec.recipe
    wrong = [rung for rung in ladder.rungs if rung.outcome == "failed"]
    broken = [rung for rung in wrong if rung.below == here]
    # What ran out of time would not be quicker in another form.
    in_error = [rung for rung in wrong if not rung.reason.startswith("timeout")]
    failed = {rung.label: rung.reason for rung in in_error if same_model(rung.below, here)}
    given_up = {**_failing_alike(broken), **_timed_out(broken)}
    impls, first = impls_of(run), ladder.first_impls
    context = StepContext(run, ladder.objective, impls, first, waits, failed, ladder.allowed)
    found = proposals(context, known)
    found = [one for one in found if _why_not_worth(one) or not _is_done(one, run, ladder)]
    reasons = [(one, _why_not_worth(one) or given_up.get(one.technique, "")) for one in found]
    untried = [proposal for proposal, reason in reasons if not reason]
    ready = [proposal for proposal in untried if in_time(proposal.recipe, proposal.effort)]
    late = [proposal for proposal in untried if proposal not in ready]
    not_worth = tuple((proposal, reason) for proposal, reason in reasons if reason)
    lost = Counter(_changed_settings(rung) for rung in ladder.rungs if rung.outcome != "kept")

    def promise(proposal: Proposal) -> float:
        """Halved for every rung that changed the same settings and was not kept."""
        return proposal.promise / 2 ** lost[_changed_settings(proposal)]

    best = max(ready, key=promise, default=None)
    missed = max((promise(proposal) / proposal.effort for proposal in late), default=0.0)
    # A search that has tried nothing takes what there is time for, however little it promises.
    if best is not None and ladder.rungs and promise(best) < FAR_LESS * missed:
        best, late = None, untried
    others = tuple(proposal for proposal in ready if proposal is not best)
    return Choice(best, others, not_worth, tuple(proposal.key for proposal in late))


def _failing_alike(broken: Iterable[Rung]) -> dict[str, str]:
    """Return techniques of which two forms have failed for one reason, with that reason."""
    seen: dict[tuple[str, str], list[str]] = {}
    for rung in broken:
        seen.setdefault((rung.technique, rung.reason), []).append(rung.label)
    return {
        name: f"{' and '.join(labels[:2])} failed alike: {reason}"
        for (name, reason), labels in seen.items()
        if len(labels) > 1
    }


def _timed_out(broken: Iterable[Rung]) -> dict[str, str]:
    """Return techniques that ran out of time, with the form that did: no other would be quicker."""
    return {
        rung.technique: f"{rung.label} ran out of time"
        for rung in broken
        if rung.reason.startswith("timeout")
    }


def _changed_settings(change: Proposal | Rung) -> tuple[str, ...]:
    """Return the technique, and the names of the settings that change."""
    return (change.technique, *change.change)


def _why_not_worth(proposal: Proposal) -> str:
    """Return why a suggestion is not worth a try, or ""."""
    if proposal.conflict:
        return proposal.conflict
    limit = proposal.ceiling
    if limit is not None and limit.share < MIN_SHARE:
        return f"can gain at most {units.percent(limit.share)} ({limit.parts or 'nothing'})"
    return ""


def _is_done(proposal: Proposal, run: Run, ladder: Ladder) -> bool:
    """Whether a suggestion has been tried, and nothing has changed that would let it win."""
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
        return len(before) >= MAX_FAILURES
    lost = last.outcome in ("no gain", "cannot tell")
    if not lost or limit is None or last.ceiling_share is None:
        return True
    return limit.share < GROWN * last.ceiling_share
