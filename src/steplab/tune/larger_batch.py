"""The end of `--batch auto`: does the winner gain by a larger batch, or by making room for one?

The batch was chosen under the first recipe. Once the winner is known, its batch is doubled while
that pays. Where only memory ends the doubling, what trades time for memory is tried at the batches
that did not fit, and judged by tokens per second: through the gate, and in turns with the winner at
its own best batch. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from steplab.core import Run, RunSpec, Samples, units
from steplab.core.errors import SteplabError
from steplab.core.ladder import BatchTrial, Rung
from steplab.step.batch_size import MAX_BATCH, BatchSearch, fastest_batch
from steplab.store import Store
from steplab.techniques.context import StepContext
from steplab.tune.ceilings import MIN_SHARE, step_ms
from steplab.tune.options import GateOptions
from steplab.tune.progress import SearchClock, View
from steplab.tune.proposals import Proposal, is_slow, memory_savers
from steplab.tune.rung import MIN_GAIN, outcome_of, pass_gate, verdict_text
from steplab.verify.remote import ReferenceWorker, RemoteCandidate
from steplab.verify.shapes import GateShape
from steplab.workers.alternate import LiveSide, alternate_until_clear
from steplab.workers.trials import TrialRunner

# What each takes, in candidates of a rung: the winner at about three batches; a technique at its
# own batch and at two more, then both sides once more in turns.
OWN_TRIALS, SAVER_TRIALS = 2, 3


class LargerBatches:
    """The batches of one winner, whose profiled Run it is and whose host `waits` in these lines."""

    def __init__(
        self,
        winner: Run,
        allowed: tuple[str, ...],
        waits: Sequence[str],
        gate: GateOptions,
        references: ReferenceWorker,
        store: Store,
        clock: SearchClock,
        view: View,
    ) -> None:
        self.winner = winner
        self.allowed = allowed  # settings that change what is computed
        self.waits = waits
        self.gate = gate
        self.references = references
        self.store = store
        self.clock = clock
        self.view = view

    def run(self) -> tuple[BatchTrial, ...]:
        """Return the winner at its best batch, then what makes room for a larger one.

        Empty where there is no time for it.
        """
        if not self._in_time(OWN_TRIALS):
            return ()
        found = self._search(self.winner.spec, max(1, self.winner.spec.batch // 2))
        if found.best is None:
            return ()
        best, why_not = found.best, larger_would_not_pay(found)
        trials = [trial_of(best, "best so far", why_not or found.reason)]
        if why_not:
            return tuple(trials)
        for saver in memory_savers(StepContext(self.winner, "memory", allowed=self.allowed)):
            if self._in_time(SAVER_TRIALS):
                trials.append(self._make_room(saver, best, found))
        return tuple(trials)

    def _make_room(self, saver: Proposal, best: Run, found: BatchSearch) -> BatchTrial:
        """Try a technique at the batches that did not fit, against the winner at its best one."""
        spec = replace(self.winner.spec, recipe=saver.recipe)
        (at_own,) = self._search(spec, best.spec.batch, most=best.spec.batch).runs
        if at_own.status != "ok":
            return trial_of(at_own, "failed", at_own.reason)
        cost = cost_of(at_own, best)
        larger = self._search(spec, did_not_fit(found)).best
        if larger is None:
            return trial_of(
                at_own, "no gain", f"{did_not_fit(found)} sequences do not fit either", cost
            )
        if (larger.tokens_per_second or 0.0) <= (best.tokens_per_second or 0.0):
            return trial_of(
                larger, "no gain", "fewer tokens a second, by one measurement each", cost
            )
        try:
            return self._compare(saver, larger, best, cost)
        except SteplabError as error:
            return trial_of(larger, "failed", str(error), cost)

    def _compare(self, saver: Proposal, larger: Run, best: Run, cost: str) -> BatchTrial:
        """Put a technique through the gate; then it and the winner, each at its batch, in turns."""
        gate, stage, timeout = self.gate, self.view.stage, self.clock.candidate_timeout(0.0)
        shapes, problem = self.references.prepare(larger.spec, gate.shapes, timeout, stage)
        if problem:
            return trial_of(larger, "failed", problem.message, cost)
        recipe, below = larger.spec.recipe, self.winner.spec.recipe
        planned = Rung(saver.technique, saver.change, recipe, below, "failed")
        with (
            RemoteCandidate(best.spec, best.environment, gate.pool) as first,
            RemoteCandidate(larger.spec, larger.environment, gate.pool) as second,
        ):
            result = second.open(_named(shapes), gate.references, timeout, stage)
            rung = pass_gate(replace(planned, checks=result.checks), result, self.waits, gate)
            if rung.outcome != "kept":
                return replace(
                    trial_of(larger, rung.outcome, rung.reason, cost), checks=rung.checks
                )
            first.open((), gate.references, timeout, stage)
            turns = alternate_until_clear(
                first,
                SameTokens(second, best.spec.batch / larger.spec.batch),
                step_ms=step_ms(best),
                seconds=gate.turns_seconds,
                timeout=timeout,
                progress=stage,
                gain=MIN_GAIN,
            )
        trial = trial_of(larger, outcome_of(turns), verdict_text(turns, "token"), cost)
        return replace(trial, change=turns.change, checks=rung.checks)

    def _search(self, spec: RunSpec, first: int, most: int = MAX_BATCH) -> BatchSearch:
        with TrialRunner(self.clock.candidate_timeout(0.0), worker=self.gate.pool.take()) as trials:

            def measure(batch: int) -> Run:
                self.view.stage(f"measuring batch {batch} with {spec.recipe.label}")
                run = trials.trial(replace(spec, batch=batch), self.winner.environment)
                self.store.save(run)
                return self._with_room(run)

            return fastest_batch(measure, first, most)

    def _with_room(self, run: Run) -> Run:
        """Return the Run as one that did not fit where its peer would find no room beside it.

        The one that waits for its turn keeps its weights and the optimizer's state.
        """
        memory = run.memory
        most = self.gate.memory_limit or (memory.total if memory else None)
        if memory is None or most is None or memory.peak + memory.before <= most:
            return run
        return replace(run, status="oom", reason="no room for it and its peer")

    def _in_time(self, candidates: int) -> bool:
        """Whether there is time for as much work as so many candidates of a rung are."""
        return self.clock.left > candidates * self.clock.expected(is_slow(self.winner.spec.recipe))


class SameTokens:
    """A step of another batch, whose times are told for as many tokens as the other side has."""

    def __init__(self, side: LiveSide, share: float) -> None:
        self.side = side
        self.share = share

    def measure(self, steps: int, timeout: float) -> Samples:
        """Time so many steps; milliseconds for the tokens of the other side's step."""
        seen = self.side.measure(steps, timeout)
        return Samples(tuple(ms * self.share for ms in seen.values), "ms", seen.marks)


def did_not_fit(found: BatchSearch) -> int:
    """Return the smallest batch for which there was no room."""
    return min(run.spec.batch for run in found.runs if run.status == "oom")


def larger_would_not_pay(found: BatchSearch) -> str:
    """Return why a larger batch than those that fit would gain nothing; "" where it may.

    Tokens per second grow ever more slowly with the batch, so the next doubling brings at most as
    much as the last one did.
    """
    assert found.best is not None
    if not any(run.status == "oom" for run in found.runs):
        return found.reason
    rates = {r.spec.batch: r.tokens_per_second or 0.0 for r in found.runs if r.status == "ok"}
    best = found.best.spec.batch
    if best < max(rates):
        return f"no gain beyond {best} sequences"
    before = [rate for batch, rate in rates.items() if batch < best]
    growth = rates[best] / before[-1] - 1 if before and before[-1] else MIN_SHARE
    if growth < MIN_SHARE:
        return f"the last step up to {best} sequences brought {units.percent(growth)}"
    return ""


def cost_of(saver: Run, plain: Run) -> str:
    """Say what a technique costs at the same batch: time, for which it frees memory."""
    slower = step_ms(saver) / step_ms(plain) - 1
    words = f"{slower * 100:+.0f} % time"
    if saver.memory and plain.memory and plain.memory.peak:
        words += f", {(saver.memory.peak / plain.memory.peak - 1) * 100:+.0f} % memory"
    return f"{words} at batch {plain.spec.batch}"


def trial_of(run: Run, outcome: str, reason: str, cost: str = "") -> BatchTrial:
    """Return what is told of a recipe at its best batch."""
    peak = run.memory.peak if run.memory else None
    rate = run.tokens_per_second
    return BatchTrial(run.spec.recipe, run.spec.batch, outcome, reason, rate, peak, cost)


def _named(shapes: Sequence[GateShape]) -> tuple[GateShape, ...]:
    """Return the shapes with their batch in words: it is not that of the step."""
    return tuple(
        replace(shape, words=shape.words or f"at batch {shape.spec.batch}") for shape in shapes
    )
