"""One rung: a recipe on top of the champion, through the gate, then measured in turns. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from steplab.core import Run, units
from steplab.core.errors import SteplabError
from steplab.core.ladder import Check, Rung
from steplab.techniques.context import Objective
from steplab.techniques.recipes import technique
from steplab.tune.ceilings import step_ms
from steplab.tune.champion import Champion
from steplab.tune.view import View
from steplab.verify.checks import run_checks
from steplab.verify.remote import CandidateResult, RemoteCandidate
from steplab.verify.shapes import GateShape
from steplab.workers.alternate import MAX_SECONDS, Alternation, alternate_until_clear
from steplab.workers.pool import WorkerPool

MORE_TIME = "a larger --budget"
_STATUS = {
    "oom": "a smaller --batch, or --objective memory, which tries checkpointing and bf16",
    "timeout": MORE_TIME,
    "crashed": "try it alone with steplab bench step --recipe, and read what it prints",
    "failed": "try it alone with steplab bench step --recipe",
}
_CHECKS = {
    "no synchronisation": "keep the values on the device; steplab lint names the lines",
    "no new graphs after warm-up": "keep shapes and Python values the same from step to step",
    "memory within the limit": "a smaller --batch or a larger --memory-limit",
    "clocks agree": "measure again on a quiet machine",
}
_NUMERICS = "do not use it: it computes something else than the plain step does"
_UNVERIFIED = "make the reference tell: seed the batches, use a smaller shape"


def remedy_for_run(run: Run, name: str) -> str:
    """Return a remedy for a Run that did not end well; its reason may have told one already."""
    return technique(name).remedy(run) or _STATUS.get(run.status, "")


def remedy_for_slower(run: Run, name: str) -> str:
    """Return what the technique knows of a step that it made slower."""
    return technique(name).remedy(run)


def remedy_for_checks(checks: Sequence[Check]) -> str:
    """Return a remedy for the first check that has not passed."""
    first = next((check for check in checks if not check.passed), None)
    if first is None:
        return ""
    if first.detail.startswith("unverified"):
        return _UNVERIFIED
    return _CHECKS.get(first.name, _NUMERICS)


def remedy_for_turns() -> str:
    """Return a remedy for a candidate that was lost beside the champion: both must fit."""
    return _STATUS["oom"]


# Peaks differ by less than this from one process to the next without any reason.
MIN_MEMORY_GAIN = 0.02
# A gain below this is not worth a setting more.
MIN_GAIN = 0.01
# What a technique may cost at most to be taken out.
MAX_LOSS = 0.02
# Two processes of the very same step on a CPU differ by up to 5 % for as long as they live, which
# no number of turns shows. A gain below this is measured once more, by two new processes.
SURE_GAIN = 0.08


@dataclass(frozen=True)
class GateOptions:
    """What a search is asked for."""

    objective: Objective = "time"
    memory_limit: int | None = None  # bytes; None: what the device has
    shapes: tuple[GateShape, ...] = ()
    references: Path = Path()
    spares: WorkerPool = field(default_factory=WorkerPool)
    turns_seconds: float = MAX_SECONDS  # that the turns of one rung may take
    may_confirm: bool = True  # a small gain, with two more processes: there is time


@dataclass(frozen=True)
class RungResult:
    """A rung with its candidate: alive where the rung may be climbed, else None."""

    rung: Rung
    candidate: RemoteCandidate | None
    opened: CandidateResult
    lost: bool = False  # a worker was lost in the turns: nobody knows the champion's state


def try_recipe(
    blank: Rung, champion: Champion, rules: GateOptions, timeout: float, view: View
) -> RungResult:
    """Open `blank.recipe` beside the champion and judge it; `blank` has what is known before.

    The candidate's process ends here unless it wins.
    """
    spec = replace(champion.run.spec, recipe=blank.recipe)
    candidate = RemoteCandidate(spec, champion.run.environment, rules.spares)
    tried = None
    try:
        if spec.device == "cuda":  # where the host's cores have nothing else to do
            rules.spares.refill()
        opened = candidate.open(rules.shapes, rules.references, timeout, view.stage)
        rung = _pass_gate(_with_run(blank, opened, champion), opened, champion.waits, rules)
        if rung.outcome == "kept":
            rules.spares.wait(view.stage)
            tried = _measure_in_turns(rung, candidate, opened, champion, rules, timeout, view)
        else:
            tried = RungResult(rung, None, opened)
    finally:
        if tried is None or tried.candidate is None:
            candidate.close()
    return tried


def _measure_in_turns(
    rung: Rung,
    candidate: RemoteCandidate,
    opened: CandidateResult,
    champion: Champion,
    rules: GateOptions,
    timeout: float,
    view: View,
) -> RungResult:
    """Measure in turns with the champion."""
    try:
        both = (champion.candidate, candidate)
        turns = _alternate(*both, rung, champion, rules, timeout, view)
    except SteplabError as error:
        failed = replace(rung, outcome="failed", reason=str(error), remedy=remedy_for_turns())
        return RungResult(failed, None, opened, lost=True)
    rung = _verdict(rung, turns, rules.objective)
    if _needs_confirmation(rung, candidate.spec.device):
        rung = _confirm(rung, champion, rules, timeout, view)
    if rung.outcome == "no gain" and turns.verdict == "slower":
        rung = replace(rung, remedy=remedy_for_slower(opened.run, rung.technique))
    won = rung.outcome in ("kept", "removed")
    return RungResult(rung, candidate if won else None, opened)


def _alternate(
    first: RemoteCandidate,
    second: RemoteCandidate,
    rung: Rung,
    champion: Champion,
    rules: GateOptions,
    timeout: float,
    view: View,
) -> Alternation:
    """Measure two candidates in turns; what is taken out need not gain."""
    return alternate_until_clear(
        first,
        second,
        step_ms=step_ms(champion.run),
        seconds=rules.turns_seconds,
        timeout=timeout,
        progress=view.stage,
        gain=MIN_GAIN if rung.change else None,
    )


def _needs_confirmation(rung: Rung, device: str) -> bool:
    small = rung.gain is not None and rung.gain.value > -SURE_GAIN
    return device == "cpu" and rung.outcome == "kept" and bool(rung.change) and small


def _confirm(
    rung: Rung, champion: Champion, rules: GateOptions, timeout: float, view: View
) -> Rung:
    """Measure a small gain once more, by two new processes; what does not come back is no gain."""
    if not rules.may_confirm:
        reason = f"{rung.reason}; no time to measure so small a gain again with new processes"
        return replace(rung, outcome="cannot tell", reason=reason, remedy=MORE_TIME)
    view.stage("confirming a small gain with new processes")
    environment, spec = champion.run.environment, champion.run.spec
    pair = [
        RemoteCandidate(replace(spec, recipe=r), environment, rules.spares)
        for r in (rung.below, rung.recipe)
    ]
    try:
        for one in pair:
            one.open((), rules.references, timeout, view.stage)
        turns = _alternate(pair[0], pair[1], rung, champion, rules, timeout, view)
    except SteplabError as error:
        return replace(rung, outcome="no gain", reason=f"not confirmed: {error}")
    finally:
        for one in pair:
            one.close()
    again = _verdict(rung, turns, rules.objective)
    if again.outcome == "kept":
        return replace(rung, reason=f"{rung.reason}; confirmed by new processes")
    return replace(again, reason=f"not confirmed by new processes: {_verdict_text(turns)}")


def _with_run(rung: Rung, opened: CandidateResult, champion: Champion) -> Rung:
    run, compiled = opened.run, opened.run.compilation
    return replace(
        rung,
        checks=opened.checks,
        memory_before=champion.memory,
        memory=run.memory.peak if run.memory else None,
        cold_seconds=compiled.cold_seconds if compiled else None,
        warm_seconds=compiled.warm_seconds if compiled else None,
        run=run.id,
        waits=len(opened.waits),
    )


def _pass_gate(
    rung: Rung, opened: CandidateResult, allowed: Sequence[str], rules: GateOptions
) -> Rung:
    """Return the rung as failed, as red, or as kept: the gate is green and speed may decide."""
    run = opened.run
    if run.status != "ok":
        reason = run.reason if run.status == "failed" else f"{run.status}: {run.reason}"
        return replace(
            rung, outcome="failed", reason=reason, remedy=remedy_for_run(run, rung.technique)
        )
    if run.clock is not None:
        own = run_checks(run, opened.waits, allowed, rules.memory_limit)
        rung = replace(rung, checks=(*opened.checks, *own))
    if not rung.green:
        wrong = next((check for check in rung.checks if not check.passed), None)
        reason = f"{wrong.name}: {wrong.detail}" if wrong else "nothing was verified"
        remedy = remedy_for_checks(rung.checks)
        return replace(rung, outcome="red gate", reason=reason, remedy=remedy)
    return replace(rung, outcome="kept")


def _verdict(rung: Rung, turns: Alternation, objective: Objective) -> Rung:
    rung = replace(rung, before=turns.before, after=turns.after, gain=turns.change)
    if objective == "memory":
        return _memory_verdict(rung)
    if rung.ceiling_share is not None:  # the step may take another time now than in its profile
        rung = replace(rung, ceiling=rung.ceiling_share * turns.before.median)
    if not rung.change:  # a technique less: it goes where that surely costs nothing
        gone = turns.change.high < MAX_LOSS
        return replace(rung, outcome="removed" if gone else "needed", reason=_verdict_text(turns))
    if turns.verdict == "cannot tell" and turns.change.low <= -MIN_GAIN:
        return replace(rung, outcome="cannot tell", reason=_verdict_text(turns))
    won = turns.verdict == "faster" and turns.change.value <= -MIN_GAIN
    return replace(rung, outcome="kept" if won else "no gain", reason=_verdict_text(turns))


def _memory_verdict(rung: Rung) -> Rung:
    if rung.memory is None or not rung.memory_before:
        return replace(rung, outcome="no gain", reason="the peak is unknown on this system")
    share = 1 - rung.memory / rung.memory_before
    said = f"{units.bytes_(rung.memory_before)} to {units.bytes_(rung.memory)} at the peak"
    if not rung.change:
        gone = share > -MIN_MEMORY_GAIN
        return replace(rung, outcome="removed" if gone else "needed", reason=said)
    return replace(rung, outcome="kept" if share >= MIN_MEMORY_GAIN else "no gain", reason=said)


def _verdict_text(turns: Alternation) -> str:
    """The verdict in a few words: time per step, and the interval."""
    change = turns.change
    span = f"{change.low * 100:+.1f} to {change.high * 100:+.1f} %"
    if turns.verdict == "cannot tell":
        return f"cannot tell: {span} time per step"
    return f"{turns.verdict}: {change.value * 100:+.1f} % time per step ({span})"
