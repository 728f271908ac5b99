"""One rung: a recipe on top of the champion, through the gate, then measured in turns. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from time import monotonic

from steplab.core import Run, units
from steplab.core.errors import SteplabError
from steplab.core.ladder import Check, Outcome, Rung, worst_check
from steplab.techniques.context import Objective
from steplab.techniques.recipes import technique
from steplab.tune.ceilings import MIN_SHARE, step_ms
from steplab.tune.champion import Champion
from steplab.tune.options import GateOptions
from steplab.tune.progress import View
from steplab.verify.checks import run_checks
from steplab.verify.remote import CandidateResult, RemoteCandidate
from steplab.workers.alternate import Alternation, alternate_until_clear

# Peaks differ by less than this from one process to the next without any reason.
MIN_MEMORY_GAIN = 0.02
# A gain below this is not worth a setting more.
MIN_GAIN = 0.01
# What a technique may cost at most to be taken out.
MAX_LOSS = 0.02
# Two processes of the very same step on a CPU differ by up to 5 % for as long as they live, which
# no number of rounds shows. A gain below this is measured once more, by two new processes.
SURE_GAIN = 0.08


@dataclass(frozen=True)
class RungResult:
    """A rung with its candidate: alive where the rung may be climbed, else None."""

    rung: Rung
    candidate: RemoteCandidate | None
    result: CandidateResult
    lost: bool = False  # a worker was lost in the turns: the champion's state is unknown


def try_recipe(
    planned: Rung, champion: Champion, gate: GateOptions, timeout: float, view: View
) -> RungResult:
    """Open the recipe of a planned rung beside the champion and judge it.

    The candidate's process ends here unless it wins.
    """
    spec, begun = replace(champion.run.spec, recipe=planned.recipe), monotonic()
    with ExitStack() as stack:
        candidate = RemoteCandidate(spec, champion.run.environment, gate.pool)
        stack.enter_context(candidate)
        if spec.device == "cuda":  # where the host's cores have nothing else to do
            gate.pool.refill()
        result = candidate.open(gate.shapes, gate.references, timeout, view.stage)
        rung = pass_gate(_with_run(planned, result, champion), result, champion.waits, gate)
        if rung.outcome != "kept":
            return RungResult(rung, None, result)
        opened = monotonic() - begun
        gate.pool.wait(view.stage)
        tried = _measure_in_turns(rung, candidate, result, champion, gate, timeout, view, opened)
        if tried.candidate is not None:
            stack.pop_all()  # it stays alive
        return tried


def _with_run(rung: Rung, result: CandidateResult, champion: Champion) -> Rung:
    run, compiled = result.run, result.run.compilation
    return replace(
        rung,
        checks=result.checks,
        memory_before=champion.memory,
        memory=run.memory.peak if run.memory else None,
        cold_seconds=compiled.cold_seconds if compiled else None,
        warm_seconds=compiled.warm_seconds if compiled else None,
        run=run.id,
        waits=len(result.waits),
    )


def pass_gate(
    rung: Rung, result: CandidateResult, allowed: Sequence[str], gate: GateOptions
) -> Rung:
    """Return the rung as failed, as red, or as kept: the gate is green and speed may decide."""
    run = result.run
    if run.status != "ok":
        reason = run.reason if run.status == "failed" else f"{run.status}: {run.reason}"
        remedy = remedy_for_run(run, rung.technique)
        return replace(rung, outcome="failed", reason=reason, remedy=remedy)
    if run.clock is not None:
        own = run_checks(run, result.waits, allowed, gate.memory_limit)
        rung = replace(rung, checks=(*result.checks, *own))
    return replace(rung, outcome="kept") if rung.green else _red(rung)


def with_curves(rung: Rung, checks: Sequence[Check]) -> Rung:
    """Return a rung that has won with the checks of its curves, which may cost it the gain."""
    rung = replace(rung, checks=(*rung.checks, *checks))
    return rung if rung.green else replace(_red(rung), gain=None, before=None, after=None)


def _red(rung: Rung) -> Rung:
    wrong = worst_check(rung.checks)
    reason = f"{wrong.name}: {wrong.detail}" if wrong else "nothing was verified"
    remedy = remedy_for_checks(rung.checks)
    return replace(rung, outcome="red gate", reason=reason, remedy=remedy)


def _measure_in_turns(
    rung: Rung,
    candidate: RemoteCandidate,
    result: CandidateResult,
    champion: Champion,
    gate: GateOptions,
    timeout: float,
    view: View,
    opened: float,
) -> RungResult:
    """Let the speed decide: candidate and champion in turns, an odd gain twice.

    Opening the candidate took `opened` seconds.
    """
    begun = monotonic()
    try:
        turns = _alternate(champion.candidate, candidate, rung, champion, gate, timeout, view)
    except SteplabError as error:
        no_memory = any(word in str(error) for word in ("memory", "worker was lost"))
        remedy = BOTH_MUST_FIT if no_memory else _STATUS["failed"]
        failed = replace(rung, outcome="failed", reason=str(error), remedy=remedy)
        return RungResult(failed, None, result, lost=True)
    rung = _verdict(rung, turns, gate.objective)
    if _needs_confirmation(rung, candidate.spec.device):
        if gate.confirms:
            rung = replace(rung, reason=f"{rung.reason}; found before by other processes")
        else:
            # Two processes that find the compiled code of this one, and turns of the usual length.
            turned = min(monotonic() - begun, gate.turns_seconds)
            seconds = 2 * (opened - cold_extra(rung)) + turned
            rung = _confirm(rung, champion, gate, timeout, view, seconds)
    if rung.outcome == "no gain" and turns.verdict == "slower":
        rung = replace(rung, remedy=technique(rung.technique).remedy(result.run))
    won = rung.outcome in ("kept", "removed")
    return RungResult(rung, candidate if won else None, result)


def _alternate(
    first: RemoteCandidate,
    second: RemoteCandidate,
    rung: Rung,
    champion: Champion,
    gate: GateOptions,
    timeout: float,
    view: View,
) -> Alternation:
    """Measure two candidates in turns; a rung that takes a technique out need not gain."""
    return alternate_until_clear(
        first,
        second,
        step_ms=step_ms(champion.run),
        seconds=gate.turns_seconds,
        timeout=timeout,
        progress=view.stage,
        gain=MIN_GAIN if rung.change else None,
        patience=gate.patience,
    )


def _needs_confirmation(rung: Rung, device: str) -> bool:
    """Whether a gain on a CPU may be noise: a small one, or more than its ceiling allows."""
    if device != "cpu" or rung.outcome != "kept" or not rung.change or rung.gain is None:
        return False
    gained, most = -rung.gain.value, rung.ceiling_share
    return gained < SURE_GAIN or (most is not None and gained > most)


def cold_extra(rung: Rung) -> float:
    """Return the seconds that a rung took because nobody had compiled its step before."""
    return max(0.0, (rung.cold_seconds or 0.0) - (rung.warm_seconds or 0.0))


def _confirm(
    rung: Rung,
    champion: Champion,
    gate: GateOptions,
    timeout: float,
    view: View,
    seconds: float,
) -> Rung:
    """Measure a gain once more, by two new processes; what does not come back is no gain.

    That will take so many `seconds`.
    """
    if not gate.may_confirm(seconds):
        reason = f"{rung.reason}; no time to confirm this gain with new processes"
        return replace(rung, outcome="cannot tell", reason=reason, remedy=MORE_TIME)
    view.stage("confirming the gain with new processes")
    spec, environment = champion.run.spec, champion.run.environment
    below, above = (replace(spec, recipe=recipe) for recipe in (rung.below, rung.recipe))
    try:
        with (
            RemoteCandidate(below, environment, gate.pool) as first,
            RemoteCandidate(above, environment, gate.pool) as second,
        ):
            for candidate in (first, second):
                candidate.open((), gate.references, timeout, view.stage)
            turns = _alternate(first, second, rung, champion, gate, timeout, view)
    except SteplabError as error:
        return replace(rung, outcome="no gain", reason=f"not confirmed: {error}")
    again = _verdict(rung, turns, gate.objective)
    if again.outcome == "kept":
        return replace(rung, reason=f"{rung.reason}; confirmed by new processes")
    return replace(again, reason=f"not confirmed by new processes: {verdict_text(turns)}")


def _verdict(rung: Rung, turns: Alternation, objective: Objective) -> Rung:
    rung = replace(rung, before=turns.before, after=turns.after, gain=turns.change)
    if objective == "memory":
        return _memory_verdict(rung)
    if rung.ceiling_share is not None:  # the step may take another time now than in its profile
        rung = replace(rung, ceiling=rung.ceiling_share * turns.before.median)
    if not rung.change:  # a technique less: it goes where that surely costs nothing
        gone = turns.change.high < MAX_LOSS
        return replace(rung, outcome="removed" if gone else "needed", reason=verdict_text(turns))
    return replace(rung, outcome=outcome_of(turns), reason=verdict_text(turns))


def outcome_of(turns: Alternation) -> Outcome:
    """What becomes of a change by its time: kept only where it surely gains enough.

    Where the whole interval is below what is worth a try, there is nothing to gain.
    """
    if turns.verdict == "cannot tell" and turns.change.low <= -MIN_SHARE:
        return "cannot tell"
    won = turns.verdict == "faster" and turns.change.value <= -MIN_GAIN
    return "kept" if won else "no gain"


def _memory_verdict(rung: Rung) -> Rung:
    if rung.memory is None or not rung.memory_before:
        return replace(rung, outcome="no gain", reason="the peak is unknown on this system")
    share = 1 - rung.memory / rung.memory_before
    peaks = f"{units.bytes_(rung.memory_before)} to {units.bytes_(rung.memory)} at the peak"
    if not rung.change:
        gone = share > -MIN_MEMORY_GAIN
        return replace(rung, outcome="removed" if gone else "needed", reason=peaks)
    return replace(rung, outcome="kept" if share >= MIN_MEMORY_GAIN else "no gain", reason=peaks)


def verdict_text(turns: Alternation, per: str = "step") -> str:
    """The verdict in a few words: time per step or token, and the interval."""
    change = turns.change
    span = f"{change.low * 100:+.1f} to {change.high * 100:+.1f} %"
    if change.says_nothing:
        return "cannot tell: the rounds of the turns have nothing in common"
    if turns.verdict == "cannot tell":
        nothing = outcome_of(turns) == "no gain"
        words = f"surely gains less than {units.percent(MIN_SHARE)}" if nothing else "cannot tell"
        return f"{words}: {span} time per {per}"
    return f"{turns.verdict}: {change.value * 100:+.1f} % time per {per} ({span})"


MORE_TIME = "a larger --budget"
# Also for a candidate that was lost beside the champion.
BOTH_MUST_FIT = "a smaller --batch, or --objective memory, which tries checkpointing and bf16"
_STATUS = {
    "oom": BOTH_MUST_FIT,
    "timeout": MORE_TIME,
    "crashed": "try it alone with steplab bench step --recipe, and read what it prints",
    "failed": "try it alone with steplab bench step --recipe",
}
_CHECKS = {
    "no synchronization": "keep the values on the device; steplab lint names the lines",
    "no new graphs after warm-up": "keep shapes and Python values the same from step to step",
    "memory within the limit": "a smaller --batch or a larger --memory-limit",
    "clocks agree": "measure again on a quiet machine",
}
_NUMERICS = "do not use it: it computes something else than the plain step does"
_UNVERIFIED = "make the reference tell: seed the batches, use a smaller shape"


def remedy_for_run(run: Run, name: str) -> str:
    """Return a remedy for a Run of a technique that did not end well; its own comes first."""
    return technique(name).remedy(run) or _STATUS.get(run.status, "")


def remedy_for_checks(checks: Sequence[Check]) -> str:
    """Return a remedy for the worst check that has not passed."""
    worst = worst_check(checks)
    if worst is None:
        return ""
    if worst.detail.startswith("unverified"):
        return MORE_TIME if "timeout" in worst.detail else _UNVERIFIED
    return _CHECKS.get(worst.name, _NUMERICS)
