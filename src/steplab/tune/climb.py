"""Climb: try, keep what wins, take out what stopped paying, stop when nothing is worth it."""

from __future__ import annotations

from dataclasses import replace

from steplab.core import Recipe, Run, RunSpec, new_run_id, units
from steplab.core.errors import SteplabError
from steplab.core.ladder import Ladder, Peer, Rung, Untried
from steplab.store import Store
from steplab.techniques.recipes import lacks_scheme
from steplab.tune.ceilings import MIN_SHARE, step_ms
from steplab.tune.champion import Champion, Detail, open_champion, promote
from steplab.tune.folder import LadderFolder
from steplab.tune.options import GateOptions
from steplab.tune.progress import (
    MIN_TRY,
    SearchClock,
    Stopwatch,
    View,
    add_timings,
    without_references,
)
from steplab.tune.proposals import (
    Choice,
    Proposal,
    choose,
    is_slow,
    recipe_conflict,
    same_model,
    still_known,
)
from steplab.tune.rung import RungResult, cold_extra, try_recipe, with_curves
from steplab.tune.undecided import EFFORT, patient, plan_again, to_try_again, try_again
from steplab.verify.remote import CandidateResult, ReferenceWorker, RemoteCandidate
from steplab.workers.alternate import (
    USUAL_ROUNDS,
    Patience,
    alternate_until_clear,
    round_seconds,
)

FINAL_SHARE = 0.1  # of the budget at most, kept for the comparison at the end
# Ending a candidate that ran out of time, and beginning the next one. Without these seconds, what
# was left for the next one was always a little less than it needs.
ENDING_SECONDS = 4.0
DETAIL_SECONDS = 20.0  # that lines and memory of the winner may take


class Climb:
    """One search. Its state is on disk after every rung."""

    def __init__(
        self,
        ladder: Ladder,
        folder: LadderFolder,
        store: Store,
        references: ReferenceWorker,
        gate: GateOptions,
        clock: SearchClock,
        view: Stopwatch,
    ) -> None:
        self.ladder = ladder
        self.folder = folder
        self.store = store
        self.references = references
        self.gate = gate
        self.clock = clock
        self.view = view
        self.winning: RemoteCandidate | None = None  # on its way to become the champion

    def run(self, baseline: Champion, against: Recipe | None = None, settle: bool = True) -> Ladder:
        """Climb from the baseline, or from where an interrupted search stood; return the ladder.

        The winner is compared with the baseline, and with the recipe that is given. What is left
        of the time goes into what is undecided, unless `settle` says that others need it.
        """
        self.baseline = self.champion = baseline
        self.rungs_before = len(self.ladder.rungs)
        try:
            if self.ladder.winner != baseline.run.spec.recipe:
                self.view.stage(f"opening {self.ladder.winner.label} again")
                self.champion = self._reopen(self.ladder.winner)
                self._save(replace(self.ladder, winner_run=self.champion.run.id))
                self._learn()
            self._climb()
            self._prune()
            self._compare()
            while settle and self._settle():
                self._climb()
                self._prune()
                self._compare()
            self._finish(against)
        finally:
            for candidate in {self.champion.candidate, self.baseline.candidate, self.winning}:
                if candidate is not None:
                    candidate.close()
        return self.ladder

    def _climb(self) -> None:
        """Try the most promising suggestion until none is worth it or the budget is spent."""
        while True:
            champion, known = self.champion, self.ladder.known_ms
            choice = choose(champion.run, champion.waits, known, self.ladder, self._in_time)
            for proposal, reason in choice.not_worth:
                self._leave(Untried(proposal.key, reason))
            if choice.best is None:
                told = {untried.label for untried in self.ladder.untried}
                left = tuple(key for key in choice.late if key not in told)
                stopped = self._why_stopped(bool(left))
                self._save(replace(self.ladder, stopped=stopped, left=left))
                return
            self._try(choice.best, self._spare_seconds(choice))

    def _why_stopped(self, something_left: bool) -> str:
        tried = self.ladder.rungs[self.rungs_before :]
        if not something_left:
            late = [rung for rung in tried if rung.reason.startswith("timeout")]
            worth = f"left that could gain {units.percent(MIN_SHARE)}"
            if not late:
                return f"nothing is {worth}"
            return f"nothing else is {worth}; {len(late)} ran out of time: try a larger --budget"
        minutes = self.clock.seconds / 60
        budget = f"{minutes:g} minute{'s' * (minutes != 1)}"
        if not tried and self.clock.elapsed > self.clock.seconds / 2:
            return (
                f"references and baseline took {self.clock.elapsed:.0f} s of {budget}, and nothing "
                "fits into the rest; the same command goes on from here, or try a larger --budget"
            )
        if not tried:  # the same command would end here again
            return f"nothing of what is left fits into {budget}; try a larger --budget"
        if self.clock.left >= MIN_TRY:
            left = f"the {self.clock.left:.0f} s that were left of {budget}"
            return f"the most promising of what is left takes longer than {left}"
        return f"the budget of {budget} is spent"

    def _spare_seconds(self, choice: Choice) -> float:
        """Return what a candidate leaves for the quickest of the others, where that is quicker.

        One that does not end in time must not leave a search with nothing to show.
        """
        assert choice.best is not None
        quickest = min((self._expected(other.recipe) for other in choice.others), default=0.0)
        if not quickest or quickest >= self._expected(choice.best.recipe):
            return 0.0
        return quickest + ENDING_SECONDS

    def _try(self, proposal: Proposal, spare: float = 0.0) -> None:
        """Dry-run a recipe, then try it; a recipe that cannot run here is left alone.

        `spare` seconds are left for another one.
        """
        self._lap(proposal.key)
        self.gate.pool.refill()
        here = self.champion.run.spec
        spec = replace(here, recipe=proposal.recipe)
        timeout = self.clock.candidate_timeout(self._last_seconds + spare)
        gate, problem = self._prepare(spec, timeout)
        if problem:
            told = {(untried.label, untried.reason) for untried in self.ladder.untried}
            # Its suggestion is for somebody who chose the recipe.
            untried = Untried(proposal.key, problem.message, here.recipe.label)
            self._leave(untried)
            if (untried.label, untried.reason) not in told:
                self.view.untried(untried)
            return
        limit = proposal.ceiling
        planned = Rung(
            technique=proposal.technique,
            change=proposal.change,
            recipe=proposal.recipe,
            below=here.recipe,
            outcome="failed",
            ceiling=limit.value if limit else None,
            ceiling_share=limit.share if limit else None,
            ceiling_parts=limit.parts if limit else "",
            requires=proposal.requires,
        )
        self._judge(planned, gate, spare)

    def _prepare(self, spec: RunSpec, timeout: float) -> tuple[GateOptions, SteplabError | None]:
        """Return the gate of a recipe, with its references, and why it cannot be tried, or None."""
        stage = self.view.stage
        shapes, problem = self.references.prepare(spec, self.gate.shapes, timeout, stage)
        return replace(self.gate, shapes=shapes), problem

    def _judge(
        self, planned: Rung, gate: GateOptions, spare: float = 0.0, again: bool = False
    ) -> None:
        """Try the recipe of a rung, put what came of it on the ladder, and promote a winner."""
        below = self.ladder.rungs
        self.view.stage("starting")
        timeout = self.clock.candidate_timeout(self._last_seconds + spare)
        if again:
            tried = try_again(planned, self.champion, gate, timeout, self.view)
        else:
            gate = replace(gate, may_confirm=self.clock.can_confirm)
            tried = try_recipe(planned, self.champion, gate, timeout, self.view)
        self.winning = tried.candidate
        if tried.candidate is not None and tried.candidate.spec.mode == "full":
            tried = self._compare_curves(tried, tried.candidate)
        unnamed = replace(tried.rung, run="")  # it names its Run once that is stored
        ladder = replace(self.ladder, rungs=(*below, unnamed))
        if tried.candidate is not None:
            known = still_known(ladder.known_ms, self.champion.run, tried.result.run)
            ladder = replace(ladder, winner=tried.rung.recipe, known_ms=known)
        self._save(ladder)
        if tried.candidate is None:
            self.store.save(self._stored(tried.result.run, tried.rung))
        else:
            self._promote(tried)
        parts = self.view.lap()
        rung = replace(tried.rung, parts=parts, seconds=sum(parts.values()))
        note_seconds(self.clock, rung)
        self._save(replace(self.ladder, rungs=(*below, rung)))
        self.view.rung(rung)
        if tried.lost:
            self._restart_champion()

    def _compare_curves(self, tried: RungResult, candidate: RemoteCandidate) -> RungResult:
        """Let a winner take many more steps, at a small shape, before it is one."""
        self.view.stage("comparing curves")
        timeout = self.clock.timeout
        rung = with_curves(tried.rung, self.references.check_curves(candidate.spec, timeout))
        if rung.green:
            return replace(tried, rung=rung)
        candidate.close()
        self.winning = None
        return replace(tried, rung=rung, candidate=None)

    def _promote(self, tried: RungResult) -> None:
        """Let the candidate take the champion's place."""
        assert tried.candidate is not None
        run = self._stored(tried.result.run, tried.rung)
        new = self._profile(tried.candidate, replace(tried.result, run=run))
        if self.champion.candidate is not self.baseline.candidate:
            self.champion.candidate.close()
        self.champion, self.winning = new, None
        self._save(replace(self.ladder, winner_run=new.run.id))
        self._learn()

    def _restart_champion(self) -> None:
        """Start a new worker for the champion: the state of the old one is unknown."""
        self.champion.candidate.close()
        was_baseline = self.champion is self.baseline
        self.champion = self._reopen(self.champion.run.spec.recipe)
        if was_baseline:
            self.baseline = self.champion
        self._learn()

    def _prune(self) -> None:
        """Take out, the smallest gain first, what the recipe is no slower without."""
        weakest_first = sorted(
            self.ladder.kept, key=lambda rung: -rung.gain.value if rung.gain else 0
        )
        for name in (rung.technique for rung in weakest_first):
            recipe = self.champion.run.spec.recipe
            rest = Recipe({n: s for n, s in recipe.techniques.items() if n != name})
            is_last = name == self.ladder.kept[-1].technique
            is_done = any(r.technique == name and not r.change for r in self.ladder.rungs)
            if is_last or is_done or name not in recipe.techniques or recipe_conflict(rest):
                continue
            if lacks_scheme(rest, self.ladder.spec.ranks) or not self._in_time(rest):
                continue
            planned = Rung(name, {}, rest, recipe, "failed")
            self._lap(planned.label)
            here = replace(self.champion.run.spec, recipe=rest)
            gate, problem = self._prepare(here, self.clock.candidate_timeout(self._last_seconds))
            if not problem:
                self._judge(planned, gate)

    def _compare(self) -> None:
        """Compare the winner with the baseline, for as long as there is time and no verdict."""
        self._lap()
        self.gate.pool.wait(self.view.stage)
        if self.champion.candidate is self.baseline.candidate:
            return
        self.view.name = "the winner against the baseline"
        is_time = self.gate.objective == "time"
        turns = alternate_until_clear(
            self.baseline.candidate,
            self.champion.candidate,
            step_ms=step_ms(self.baseline.run),
            seconds=self.gate.turns_seconds,
            timeout=self.clock.timeout,
            progress=self.view.stage,
            patience=Patience(self.clock.end, MIN_SHARE) if is_time else None,
        )
        found = replace(self.ladder, before=turns.before, after=turns.after, total=turns.change)
        self._save(replace(found, parts=add_timings(found.parts, self.view.lap())))

    def _settle(self) -> bool:
        """Try once more that of which nobody could tell; return whether something won."""
        for earlier in to_try_again(self.ladder, self.champion.run.spec.recipe):
            if not self._in_time(earlier.recipe, EFFORT):
                continue
            self._lap(earlier.label)
            self.gate.pool.refill()
            spec = replace(self.champion.run.spec, recipe=earlier.recipe)
            last = self._last_seconds
            gate, problem = self._prepare(spec, self.clock.candidate_timeout(last))
            if not problem:
                gate = patient(gate, earlier, self.clock, last)
                self._judge(plan_again(earlier), gate, again=True)
            if self.ladder.winner == earlier.recipe:
                return True
        return False

    def _finish(self, against: Recipe | None) -> None:
        """Compare the winner with a peer, if it is another recipe; profile it for the report."""
        self._lap()
        ladder = self.ladder
        if against is not None and against != ladder.winner:
            self.view.name = f"the winner against {against.label}"
            peer = measure_peer(against, self.champion, self.gate, self.clock.timeout, self.view)
            ladder = replace(ladder, peer=peer)
        if self.clock.left > DETAIL_SECONDS:
            ladder = replace(ladder, winner_run=self._profile_in_detail().run.id)
        self._save(replace(ladder, parts=add_timings(ladder.parts, self.view.lap())))

    def _profile_in_detail(self) -> Champion:
        """Profile the winner once more, for the report, as a Run of its own."""
        self.view.name = "the winner in detail"
        spec = self.champion.run.spec
        run = replace(self.champion.run, id=new_run_id(spec), profile=None)
        return self._profile(self.champion.candidate, CandidateResult(run), "all")

    def _profile(
        self, candidate: RemoteCandidate, result: CandidateResult, detail: Detail | None = None
    ) -> Champion:
        """Profile and store a candidate."""
        detail = detail or self._detail
        timeout, stage = self.clock.timeout, self.view.stage
        return promote(candidate, result, self.store, timeout, stage, detail)

    def _reopen(self, recipe: Recipe) -> Champion:
        """Start a recipe that has passed the gate before."""
        spec = replace(self.ladder.spec, recipe=recipe)
        timeout, stage = self.clock.timeout, self.view.stage
        gate, _ = self._prepare(spec, timeout)
        return open_champion(spec, self.ladder, gate, self.store, timeout, stage, self._detail)

    @property
    def _detail(self) -> Detail:
        """All where memory is wanted, which nothing else tells.

        Else modules on a GPU, where one more step tells them; on a CPU seconds are short.
        """
        if self.gate.objective == "memory":
            return "all"
        return "modules" if self.ladder.spec.device == "cuda" else "none"

    def _stored(self, run: Run, rung: Rung) -> Run:
        """Return the Run as it goes into the store; one that the gate stopped has failed."""
        if run.status == "ok" and run.clock is None:
            run = replace(run, status="failed", reason=f"red gate: {rung.reason}")
        return replace(run, group=self.ladder.id)

    def _learn(self) -> None:
        """Note the champion's op and phase times; those that it lacks stay as they were."""
        known = {**self.ladder.known_ms, **self.champion.known_ms}
        self._save(replace(self.ladder, known_ms=known))

    def _leave(self, untried: Untried) -> None:
        """Note a suggestion that is not tried; the last reason counts."""
        if untried not in self.ladder.untried:
            others = tuple(u for u in self.ladder.untried if u.label != untried.label)
            self._save(replace(self.ladder, untried=(*others, untried)))

    def _in_time(self, recipe: Recipe, effort: float = 1.0) -> bool:
        """Whether there is time for one more candidate, and for the comparison at the end."""
        return self.clock.left - self._last_seconds >= effort * self._expected(recipe)

    def _expected(self, recipe: Recipe) -> float:
        """Return the seconds that trying a recipe on top of the champion will take."""
        warm = same_model(recipe, self.champion.run.spec.recipe)
        return self.clock.expected(is_slow(recipe), warm)

    @property
    def _last_seconds(self) -> float:
        """Seconds that the comparison at the end will take."""
        one = round_seconds(step_ms(self.baseline.run), step_ms(self.champion.run))
        return min(USUAL_ROUNDS * one, FINAL_SHARE * self.clock.seconds)

    def _lap(self, name: str = "") -> None:
        """Count what has been done outside of any rung; what follows is about `name`."""
        parts = add_timings(self.ladder.parts, self.view.lap(name))
        self.ladder = replace(self.ladder, parts=parts)

    def _save(self, ladder: Ladder) -> None:
        self.ladder = replace(ladder, seconds=self.clock.total)
        self.folder.save(self.ladder)


def note_seconds(clock: SearchClock, rung: Rung) -> None:
    """Let the clock know what a rung took, and what of it because nobody had compiled it before.

    A rung that ended before its turns tells nothing: a compiler that refuses takes 7 s where one
    that works takes 50. But one that ran out of time would have taken at least that.
    """
    if rung.before is None and not rung.reason.startswith("timeout"):
        return
    seconds = without_references(rung.parts) if rung.parts else rung.seconds
    warm = same_model(rung.recipe, rung.below)
    clock.note(is_slow(rung.recipe), seconds, warm, cold_extra(rung))


def measure_peer(
    recipe: Recipe, champion: Champion, gate: GateOptions, timeout: float, view: View
) -> Peer:
    """Open `recipe` beside the champion and measure both in turns; it is not verified."""
    spec = replace(champion.run.spec, recipe=recipe)
    try:
        with RemoteCandidate(spec, champion.run.environment, gate.pool) as candidate:
            run = candidate.open((), gate.references, timeout, view.stage).run
            if run.status != "ok":
                return Peer(recipe, reason=f"{run.status}: {run.reason}")
            turns = alternate_until_clear(
                candidate,
                champion.candidate,
                step_ms=step_ms(champion.run),
                seconds=gate.turns_seconds,
                timeout=timeout,
                progress=view.stage,
            )
            return Peer(recipe, turns.before, turns.after, turns.change)
    except SteplabError as error:
        return Peer(recipe, reason=str(error))
