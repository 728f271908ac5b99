"""Climb: try, keep what wins, take out what stopped paying, stop when nothing is worth it."""

from __future__ import annotations

from dataclasses import replace

from steplab.core import Environment, Recipe, Run, RunSpec, new_run_id, units
from steplab.core.errors import MeasurementError, SteplabError, Unsupported
from steplab.core.ladder import Check, Ladder, Peer, Rung, Untried
from steplab.store import Store
from steplab.tune.ceilings import MIN_SHARE, step_ms
from steplab.tune.champion import Champion, Detail, promote
from steplab.tune.clock import SearchClock
from steplab.tune.folder import LadderFolder
from steplab.tune.op_times import still_known
from steplab.tune.proposals import Proposal, choose, is_slow, recipe_conflict
from steplab.tune.report import interval, speed_up
from steplab.tune.rung import GateOptions, RungResult, try_recipe
from steplab.tune.view import Stopwatch, View, add_timings
from steplab.verify.checks import run_checks
from steplab.verify.remote import CandidateResult, ReferenceWorker, RemoteCandidate
from steplab.workers.alternate import alternate_until_clear
from steplab.workers.client import Progress


def open_baseline(
    spec: RunSpec,
    environment: Environment,
    scout: ReferenceWorker,
    rules: GateOptions,
    store: Store,
    group: str,
    timeout: float,
    view: View,
) -> tuple[Champion, tuple[Check, ...]]:
    """Measure and profile the baseline; return it alive, with its own way through the gate."""
    problem = scout.prepare(spec, rules.shapes, timeout, view.stage)
    view.stage("starting")
    if problem:
        raise MeasurementError(f"The baseline cannot be measured: {problem.rstrip('.')}.")
    candidate = RemoteCandidate(spec, environment, rules.spares)
    try:
        opened = open_required(candidate, rules, timeout, view.stage)
        opened = replace(opened, run=replace(opened.run, group=group))
        checks = (*opened.checks, *run_checks(opened.run, opened.waits, opened.waits, None))
        detail: Detail = "all" if rules.objective == "memory" else "modules"
        return promote(candidate, opened, store, timeout, view.stage, detail), checks
    except BaseException:
        candidate.close()
        raise


def open_required(
    candidate: RemoteCandidate, rules: GateOptions, timeout: float, progress: Progress
) -> CandidateResult:
    """Open a candidate without which the search cannot go on; the caller closes it."""
    opened = candidate.open(rules.shapes, rules.references, timeout, progress)
    run = opened.run
    if run.status != "ok":
        kind = Unsupported if run.status == "unsupported" else MeasurementError
        label = run.spec.recipe.label
        raise kind(f"The recipe {label} cannot be measured: {run.status}, {run.reason}")
    wrong = next((check for check in opened.checks if not check.passed), None)
    if wrong is not None:
        raise MeasurementError(
            f"No speed-up could be verified: the gate is red for {run.spec.recipe.label} itself "
            f"({wrong.name}: {wrong.detail})."
        )
    return opened


def measure_peer(
    recipe: Recipe, champion: Champion, rules: GateOptions, timeout: float, view: View
) -> Peer:
    """Open `recipe` beside the champion and measure both in turns; its numerics are not asked."""
    spec = replace(champion.run.spec, recipe=recipe)
    candidate = RemoteCandidate(spec, champion.run.environment, rules.spares)
    try:
        run = candidate.open((), rules.references, timeout, view.stage).run
        if run.status != "ok":
            return Peer(recipe, reason=f"{run.status}: {run.reason}")
        turns = alternate_until_clear(
            candidate,
            champion.candidate,
            step_ms=step_ms(champion.run),
            seconds=rules.turns_seconds,
            timeout=timeout,
            progress=view.stage,
        )
        return Peer(recipe, turns.before, turns.after, turns.change)
    except SteplabError as error:
        return Peer(recipe, reason=str(error))
    finally:
        candidate.close()


def peer_line(peer: Peer) -> str:
    """The winner against the peer, in one sentence."""
    if peer.change is None or peer.theirs is None or peer.ours is None:
        return f"{peer.recipe.label} could not be measured: {peer.reason}"
    speed = f"{speed_up(peer.change)} ({interval(peer.change)}) of the speed of {peer.recipe.label}"
    return f"{speed}: {peer.ours.median:.4g} ms against {peer.theirs.median:.4g} ms a step"


FINAL_SHARE = 0.1  # of the budget at most, kept for the last turns
FINAL_STEPS, FINAL_SECONDS = 10, 3.0  # what they are expected to take: steps of each side, and more
DETAIL_SECONDS = 20.0  # that lines and memory of the winner may take


class Climb:
    """One search. Its state is on disk after every rung."""

    def __init__(
        self,
        ladder: Ladder,
        folder: LadderFolder,
        store: Store,
        scout: ReferenceWorker,
        rules: GateOptions,
        clock: SearchClock,
        view: Stopwatch,
    ) -> None:
        self.ladder = ladder
        self.folder = folder
        self.store = store
        self.scout = scout
        self.rules = rules
        self.clock = clock
        self.view = view
        self.winning: RemoteCandidate | None = None  # on its way to become the champion

    def run(self, baseline: Champion, against: Recipe | None = None) -> Ladder:
        """Climb from the baseline, or from where an interrupted search stood; return the ladder.

        The winner is held against the baseline, and against the recipe that is given.
        """
        self.baseline = self.champion = baseline
        try:
            if self.ladder.winner != baseline.run.spec.recipe:
                self.view.stage(f"opening {self.ladder.winner.label} again")
                self.champion = self._reopened(self.ladder.winner)
                self._save(replace(self.ladder, winner_run=self.champion.run.id))
                self._learn()
            self._climb()
            self._prune()
            self._finish(against)
        finally:
            for candidate in {self.champion.candidate, self.baseline.candidate, self.winning}:
                if candidate is not None:
                    candidate.close()
        return self.ladder

    def _climb(self) -> None:
        """Try the most promising suggestion until none is worth it or the budget is spent."""
        before = len(self.ladder.rungs)
        while True:
            champion, known = self.champion, self.ladder.known_ms
            choice = choose(champion.run, champion.waits, known, self.ladder, self._in_time)
            for proposal, reason in choice.not_worth:
                self._leave(Untried(proposal.key, reason))
            if choice.best is None:
                said = f"nothing is left that could gain {units.percent(MIN_SHARE)}"
                if choice.late:
                    minutes = self.clock.seconds / 60
                    budget = f"{minutes:g} minute{'s' * (minutes != 1)}"
                    said = f"the budget of {budget} is spent"
                    if len(self.ladder.rungs) == before:  # the same command would end here again
                        said = f"nothing of what is left fits into {budget}; a larger --budget"
                self._save(replace(self.ladder, stopped=said, left=choice.late))
                return
            self._try(choice.best)

    def _try(self, proposal: Proposal) -> None:
        """Look at a recipe, then try it; a recipe that cannot run here is left."""
        self._lap(proposal.key)
        self.rules.spares.refill()
        spec = replace(self.champion.run.spec, recipe=proposal.recipe)
        timeout = self.clock.timeout(is_slow(proposal.recipe))
        problem = self.scout.prepare(spec, self.rules.shapes, timeout, self.view.stage)
        if problem:
            suggestion = Untried(proposal.key, problem, self.champion.run.spec.recipe.label)
            self._leave(suggestion)
            self.view.untried(suggestion)
            return
        limit = proposal.ceiling
        blank = Rung(
            *(proposal.technique, proposal.change, proposal.recipe, self.champion.run.spec.recipe),
            "failed",
            ceiling=limit.value if limit else None,
            ceiling_share=limit.share if limit else None,
            ceiling_parts=limit.parts if limit else "",
            requires=proposal.requires,
        )
        self._judge(blank)

    def _judge(self, blank: Rung) -> None:
        """Try the recipe of `blank`, put what came of it on the ladder, and crown a winner."""
        slow, below = is_slow(blank.recipe), self.ladder.rungs
        self.view.stage("starting")
        timeout = self.clock.timeout(slow)
        rules = replace(self.rules, may_confirm=self.clock.can_confirm(slow))
        tried = try_recipe(blank, self.champion, rules, timeout, self.view)
        self.winning = tried.candidate
        ladder = replace(self.ladder, rungs=(*below, tried.rung))
        if tried.candidate is not None:
            known = still_known(ladder.known_ms, self.champion.run, tried.opened.run)
            ladder = replace(ladder, winner=tried.rung.recipe, known_ms=known)
        self._save(ladder)
        if tried.candidate is None:
            self.store.save(self._stored(tried.opened.run, tried.rung))
        else:
            self._crown(tried)
        parts = self.view.lap()
        rung = replace(tried.rung, parts=parts, seconds=sum(parts.values()))
        self.clock.note(slow, rung.seconds)
        self._save(replace(self.ladder, rungs=(*below, rung)))
        self.view.rung(rung)
        if tried.lost:
            self._restart_champion()

    def _lap(self, name: str = "") -> None:
        """Count what has been done outside of any rung; what follows is about `name`."""
        parts = add_timings(self.ladder.parts, self.view.lap(name))
        self.ladder = replace(self.ladder, parts=parts)

    def _restart_champion(self) -> None:
        """Start the champion's worker anew: nobody knows in which state it is."""
        self.champion.candidate.close()
        was_baseline = self.champion is self.baseline
        self.champion = self._reopened(self.champion.run.spec.recipe)
        if was_baseline:
            self.baseline = self.champion
        self._learn()

    def _crown(self, tried: RungResult) -> None:
        """Let the candidate take the champion's place."""
        assert tried.candidate is not None
        run = self._stored(tried.opened.run, tried.rung)
        new = self._profiled(tried.candidate, replace(tried.opened, run=run))
        if self.champion.candidate is not self.baseline.candidate:
            self.champion.candidate.close()
        self.champion, self.winning = new, None
        self._save(replace(self.ladder, winner_run=new.run.id))
        self._learn()

    def _prune(self) -> None:
        """Take out, the smallest gain first, what the recipe is no slower without."""
        weakest_first = sorted(
            self.ladder.kept, key=lambda rung: -rung.gain.value if rung.gain else 0
        )
        for rung in weakest_first:
            name = rung.technique
            recipe = self.champion.run.spec.recipe
            rest = {n: s for n, s in recipe.techniques.items() if n != name}
            last = self.ladder.kept[-1].technique
            done = any(r.technique == name and not r.change for r in self.ladder.rungs)
            if (
                name == last
                or name not in recipe.techniques
                or done
                or recipe_conflict(Recipe(rest))
            ):
                continue
            if not self._in_time(Recipe(rest)):
                continue
            blank = Rung(name, {}, Recipe(rest), recipe, "failed")
            self._lap(blank.label)
            self._judge(blank)

    def _finish(self, against: Recipe | None) -> None:
        """Hold the winner against the baseline, in turns; close a ladder that has nothing left."""
        self._lap()
        self.rules.spares.wait(self.view.stage)
        ladder = replace(self.ladder, finished=not self.ladder.left)
        if self.champion.candidate is not self.baseline.candidate:
            self.view.name = "the winner against the baseline"
            turns = alternate_until_clear(
                self.baseline.candidate,
                self.champion.candidate,
                step_ms=step_ms(self.baseline.run),
                seconds=self.rules.turns_seconds,
                timeout=self.clock.timeout(False),
                progress=self.view.stage,
            )
            ladder = replace(ladder, before=turns.before, after=turns.after, total=turns.change)
        if against is not None:
            self.view.name = f"the winner against {against.label}"
            timeout = self.clock.timeout(is_slow(against))
            peer = measure_peer(against, self.champion, self.rules, timeout, self.view)
            ladder = replace(ladder, peer=peer)
        if self.clock.left > DETAIL_SECONDS:
            ladder = replace(ladder, winner_run=self._in_detail().run.id)
        self._save(replace(ladder, parts=add_timings(ladder.parts, self.view.lap())))

    def _in_detail(self) -> Champion:
        """Profile the winner once more, for the report, as a Run of its own."""
        self.view.name = "the winner in detail"
        spec = self.champion.run.spec
        run = replace(self.champion.run, id=new_run_id(spec), profile=None)
        return self._profiled(self.champion.candidate, CandidateResult(run), "all")

    def _reopened(self, recipe: Recipe) -> Champion:
        """Start a recipe that has passed the gate before."""
        spec = replace(self.ladder.spec, recipe=recipe)
        timeout = self.clock.timeout(is_slow(recipe))
        candidate = RemoteCandidate(spec, self.ladder.environment, self.rules.spares)
        try:
            opened = open_required(candidate, self.rules, timeout, self.view.stage)
            opened = replace(opened, run=replace(opened.run, group=self.ladder.id))
            return self._profiled(candidate, opened)
        except BaseException:
            candidate.close()
            raise

    def _profiled(
        self, candidate: RemoteCandidate, opened: CandidateResult, detail: Detail | None = None
    ) -> Champion:
        """Profile and store a candidate; in detail where memory is wanted: only that tells it.

        With modules on a GPU, where one more step tells them; on a CPU seconds are short.
        """
        if self.rules.objective == "memory":
            detail = "all"
        detail = detail or ("modules" if candidate.spec.device == "cuda" else "none")
        timeout = self.clock.timeout(is_slow(candidate.spec.recipe))
        return promote(candidate, opened, self.store, timeout, self.view.stage, detail)

    def _stored(self, run: Run, rung: Rung) -> Run:
        """The Run as it goes into the store; one that the gate stopped has failed."""
        if run.status == "ok" and run.clock is None:
            run = replace(run, status="failed", reason=f"red gate: {rung.reason}")
        return replace(run, group=self.ladder.id)

    def _learn(self) -> None:
        """Note the champion's times by op and phase; what it does not tell stays as it was."""
        known = {**self.ladder.known_ms, **self.champion.known_ms}
        self._save(replace(self.ladder, known_ms=known))

    def _leave(self, suggestion: Untried) -> None:
        """Note a suggestion that is not tried; the last reason counts."""
        if suggestion not in self.ladder.untried:
            others = tuple(u for u in self.ladder.untried if u.label != suggestion.label)
            self._save(replace(self.ladder, untried=(*others, suggestion)))

    def _in_time(self, recipe: Recipe, effort: float = 1.0) -> bool:
        """Whether there is time for one more candidate, and for the last turns."""
        both_ms = step_ms(self.baseline.run) + step_ms(self.champion.run)
        last = FINAL_SECONDS + FINAL_STEPS * both_ms / 1e3
        last = min(last, FINAL_SHARE * self.clock.seconds)
        return self.clock.left - last >= effort * self.clock.expected(is_slow(recipe))

    def _save(self, ladder: Ladder) -> None:
        self.ladder = replace(ladder, seconds=self.clock.total)
        self.folder.save(self.ladder)
