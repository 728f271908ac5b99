"""Ladder: recipes in the order they were tried, each with its gate and what it gained."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from steplab.core.comparison import Change
from steplab.core.run import Environment
from steplab.core.samples import Samples
from steplab.core.spec import Recipe, RunSpec, Settings

Outcome = Literal[
    "kept",  # the gate is green and it won
    "no gain",  # the gate is green; slower, or no faster
    "cannot tell",  # the gate is green; the turns were too noisy for a verdict
    "red gate",  # it does not compute what the baseline computes, or breaks a rule
    "failed",  # it could not run: unsupported, out of memory, crashed, timed out
    "removed",  # a rung that was kept and no longer pays
    "needed",  # a rung whose removal was tried, and which still pays
]


MANY = 3  # settings that change to the same value are named once: `impl.*=auto`


def change_label(
    technique: str, change: Settings, recipe: Recipe, requires: tuple[str, ...] = ()
) -> str:
    """Return `compile=blocks`, `compile.optimizer=true`: a change as the recipe would have it.

    `requires` are other techniques that changed with it.
    """
    if not change:
        return f"without {technique}"
    others = [Recipe({name: recipe.techniques[name]}).label for name in requires]
    if len(change) >= MANY and len(set(change.values())) == 1:
        return ",".join([f"{technique}.*={next(iter(change.values()))}", *others])
    whole = Recipe({technique: recipe.techniques[technique]}).label.split(",")
    named = dict(zip(recipe.techniques[technique], whole, strict=True))
    return ",".join([*(named[key] for key in change), *others])


@dataclass(frozen=True)
class Check:
    """One condition of the gate. What could not be verified has not passed."""

    name: str
    passed: bool
    detail: str
    excess: float = 0.0  # of numerics: the largest error over its budget; above 1 is too much


def worst_check(checks: Sequence[Check]) -> Check | None:
    """Return the red check that is the farthest beyond its budget; None where all have passed."""
    wrong = [check for check in checks if not check.passed]
    return max(wrong, key=lambda check: check.excess) if wrong else None


Verdict = Literal["bit-equal", "within rounding", "failed", "unverified"]
BIT_EQUAL: Verdict = "bit-equal"  # to one process, in every gradient and weight compared
WITHIN_ROUNDING: Verdict = "within rounding"
UNVERIFIED: Verdict = "unverified"


def verdict(checks: Sequence[Check]) -> Verdict:
    """Return in one word how a candidate compares with one process."""
    wrong = [check for check in checks if not check.passed]
    if any(not check.detail.startswith(UNVERIFIED) for check in wrong):
        return "failed"
    if wrong or not checks:
        return UNVERIFIED
    equal = [check for check in checks if check.detail.startswith(BIT_EQUAL)]
    rounded = [check for check in checks if check.detail.startswith(WITHIN_ROUNDING)]
    return BIT_EQUAL if equal and not rounded else WITHIN_ROUNDING


@dataclass(frozen=True)
class Rung:
    """One recipe that was tried on top of the best one so far, or with one technique less."""

    technique: str
    change: Settings  # the settings that differ from the recipe below; empty: technique removed
    recipe: Recipe
    below: Recipe  # what it was compared with
    outcome: Outcome
    reason: str = ""  # one sentence
    remedy: str = ""
    # The most it could gain: ms, or bytes; None: unknown. Once there are turns, in their ms: the
    # share of `before`.
    ceiling: float | None = None
    ceiling_share: float | None = None  # of the step's time or peak in the profile below
    ceiling_parts: str = ""  # what that is made of, as profiled
    checks: tuple[Check, ...] = ()
    before: Samples | None = None  # ms per step of the recipe below, in the same turns
    after: Samples | None = None
    gain: Change | None = None  # change in time per step; None: not measured, or a red gate
    memory_before: int | None = None  # bytes at the peak
    memory: int | None = None
    cold_seconds: float | None = None  # first step with empty compile caches
    warm_seconds: float | None = None
    run: str = ""  # id of its Run
    seconds: float = 0.0  # that trying it took
    parts: Mapping[str, float] = field(default_factory=dict)  # the same by what was done
    requires: tuple[str, ...] = ()  # other techniques that had to change too
    waits: int = 0  # of the host for the device, per step; the recipe below has as many or more

    @property
    def green(self) -> bool:
        """Whether every check has passed, and there was one."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def label(self) -> str:
        """The technique with what changes, as a recipe would have it."""
        return change_label(self.technique, self.change, self.recipe, self.requires)


def named_rungs(rungs: Iterable[Rung]) -> list[tuple[str, Rung]]:
    """Return rungs by names that differ where one was tried on another recipe, or once more."""
    named, below = [], defaultdict[str, list[Recipe]](list)
    for rung in rungs:
        before = below[rung.label]
        where = f" on {rung.below.label}" if before and rung.below != before[0] else ""
        named.append((f"{rung.label}{where}{', again' if rung.below in before else ''}", rung))
        before.append(rung.below)
    return named


@dataclass(frozen=True)
class Untried:
    """A suggestion that was not tried, and why."""

    label: str
    reason: str
    refused_on: str = ""  # label of the recipe on which it cannot run; "": not worth a try


@dataclass(frozen=True)
class Peer:
    """A recipe, found by hand or elsewhere, that the winner was compared with at the end."""

    recipe: Recipe
    theirs: Samples | None = None  # ms per step, in turns with the winner
    ours: Samples | None = None
    change: Change | None = None  # the winner's time over theirs; None: it could not run
    reason: str = ""  # why it could not


@dataclass(frozen=True)
class BatchTrial:
    """A recipe at the batch at which it has the most tokens per second."""

    recipe: Recipe
    batch: int
    outcome: str  # "best so far" of the winner; of what makes room for more as of a Rung
    reason: str = ""
    tokens_per_second: float | None = None
    memory: int | None = None  # bytes at the peak
    cost: str = ""  # in time, and what it frees, at the winner's best batch
    change: Change | None = None  # time per token against the winner's, in turns
    checks: tuple[Check, ...] = ()


@dataclass(frozen=True)
class Ladder:
    """All that a search has done so far; complete when `finished`."""

    id: str
    spec: RunSpec  # the baseline's
    environment: Environment
    objective: Literal["time", "memory"] = "time"
    created: str = ""
    allowed: tuple[str, ...] = ()  # settings that change what is computed and may be tried
    baseline_run: str = ""  # id of the profiled baseline
    baseline_checks: tuple[Check, ...] = ()
    winner_run: str = ""  # id of the profiled winner
    winner: Recipe = field(default_factory=Recipe)
    rungs: tuple[Rung, ...] = ()
    untried: tuple[Untried, ...] = ()
    gate_shapes: tuple[str, ...] = ()  # where numerics were compared, in words
    # op:*, idle:*, phase:* -> ms of the winner's step, each from the last recipe that showed it
    known_ms: Mapping[str, float] = field(default_factory=dict)
    first_impls: Mapping[str, str] = field(default_factory=dict)  # op -> what ran in the baseline
    waits: tuple[str, ...] = ()  # lines in which the baseline waits for the device, one per wait
    padding: float = 0.0  # share of the batch, where one of its tensors tells
    padding_told_by: str = ""  # the name of that tensor
    contention: str = ""  # of the machine while the baseline was measured, in words; "": none
    before: Samples | None = None  # ms per step of the baseline, in turns with the winner
    after: Samples | None = None
    total: Change | None = None  # winner against baseline
    peer: Peer | None = None
    own: Recipe | None = None  # what the script that is tuned has already; None: no script
    batches: tuple[BatchTrial, ...] = ()  # of --batch auto, the winner first
    stopped: str = ""  # why the search ended
    left: tuple[str, ...] = ()  # suggestions for which there was no time
    parts: Mapping[str, float] = field(default_factory=dict)  # seconds before the first rung
    seconds: float = 0.0  # of measuring, over all calls
    finished: bool = False  # nothing is left to try: the next search starts over

    @property
    def kept(self) -> tuple[Rung, ...]:
        """The rungs that were climbed, in order; some of them may have been taken out later."""
        return tuple(rung for rung in self.rungs if rung.outcome == "kept")

    @property
    def has_winner_already(self) -> bool:
        """Whether the script that is tuned has the winner already: there is nothing to change."""
        return self.winner == self.own

    @property
    def undecided(self) -> tuple[Rung, ...]:
        """The rungs of which nobody could tell; what was decided later is none of them."""
        last = {rung.label: rung for rung in self.rungs if rung.outcome != "failed"}
        return tuple(rung for rung in last.values() if rung.outcome == "cannot tell")
