"""Climb: try, keep what wins, take out what stopped paying, stop when nothing is worth it."""

from __future__ import annotations

from dataclasses import replace
from time import monotonic

from steplab import units
from steplab.engine.gate.opened import Opened
from steplab.engine.gate.remote import RemoteCandidate, Scout
from steplab.record import Run, new_run_id
from steplab.record.ladder import Ladder, Rung, Untried
from steplab.spec import Recipe
from steplab.store import Store
from steplab.tune.ceilings import step_ms
from steplab.tune.champion import Champion, crowned
from steplab.tune.choosing import WORTH, choose
from steplab.tune.clock import SearchClock
from steplab.tune.offers import Proposal, conflict, is_slow
from steplab.tune.start import opened_or_raise
from steplab.tune.state import LadderFolder
from steplab.tune.trying import Rules, Tried, try_recipe
from steplab.tune.turns import take_turns
from steplab.tune.view import View

FINAL_SHARE = 0.1  # of the budget, kept for the last turns


class Climb:
    """One search. Its state is on disk after every rung."""

    def __init__(
        self,
        ladder: Ladder,
        folder: LadderFolder,
        store: Store,
        scout: Scout,
        rules: Rules,
        clock: SearchClock,
        view: View,
    ) -> None:
        self.ladder = ladder
        self.folder = folder
        self.store = store
        self.scout = scout
        self.rules = rules
        self.clock = clock
        self.view = view
        self.winning: RemoteCandidate | None = None  # on its way to become the champion

    def run(self, baseline: Champion) -> Ladder:
        """Climb from the baseline, or from where an interrupted search stood; return the ladder."""
        self.baseline = self.champion = baseline
        try:
            if self.ladder.winner != baseline.run.spec.recipe:
                self.view.stage(f"opening {self.ladder.winner.label} again")
                self.champion = self._reopened(self.ladder.winner)
                self._save(replace(self.ladder, winner_run=self.champion.run.id))
            self._climb()
            self._prune()
            self._finish()
        finally:
            for candidate in {self.champion.candidate, self.baseline.candidate, self.winning}:
                if candidate is not None:
                    candidate.close()
        return self.ladder

    def _climb(self) -> None:
        """Try the most promising offer until none is worth it or the budget is spent."""
        while True:
            choice = choose(self.champion.run, self._known_ms(), self.ladder, self._in_time)
            for proposal, reason in choice.not_worth:
                self._leave(Untried(proposal.key, reason))
            if choice.best is None:
                said = f"nothing is left that could gain {units.percent(WORTH)}"
                if choice.late:
                    said = f"the budget of {self.clock.seconds / 60:g} minutes is spent"
                self._save(replace(self.ladder, stopped=said, left=choice.late))
                return
            tried = self._try(choice.best)
            if tried is not None and tried.rung.outcome == "kept":
                self._crown(tried)

    def _try(self, proposal: Proposal) -> Tried | None:
        """Look at a recipe, then try it; a recipe that cannot run here is left."""
        self.view.stage(f"{proposal.key}: looking at it")
        spec = replace(self.champion.run.spec, recipe=proposal.recipe)
        timeout = self.clock.timeout(is_slow(proposal.recipe))
        dtype, problem = self.scout.look(spec, self.rules.shapes[0], timeout)
        for shape in self.rules.shapes if not problem else ():
            problem = problem or self.scout.reference(shape, dtype, timeout)
        if problem:
            offer = Untried(proposal.key, problem, self.champion.run.spec.recipe.label)
            self._leave(offer)
            self.view.untried(offer)
            return None
        limit = proposal.ceiling
        blank = Rung(
            *(proposal.technique, proposal.change, proposal.recipe, self.champion.run.spec.recipe),
            "failed",
            ceiling=limit.value if limit else None,
            ceiling_share=limit.share if limit else None,
            ceiling_parts=limit.parts if limit else "",
        )
        return self._judged(blank)

    def _judged(self, blank: Rung) -> Tried:
        """Try the recipe of `blank`, and put what came of it on the ladder and into the store."""
        slow, start = is_slow(blank.recipe), monotonic()
        self.view.stage(f"{blank.label}: starting")
        tried = try_recipe(
            *(blank, self.champion, self.baseline.waits, self.rules),
            *(self.clock.timeout(slow), _Named(self.view, blank.label)),
        )
        self.winning = tried.candidate
        seconds = monotonic() - start
        self.clock.note(slow, seconds)
        rung = replace(tried.rung, seconds=seconds)
        if tried.candidate is None:
            self.store.save(self._stored(tried.opened.run, rung))
        won = rung.recipe if tried.candidate is not None else self.ladder.winner
        self._save(replace(self.ladder, rungs=(*self.ladder.rungs, rung), winner=won))
        self.view.rung(rung)
        if tried.lost:
            self._restart_champion()
        return replace(tried, rung=rung)

    def _restart_champion(self) -> None:
        """Start the champion's worker anew: nobody knows in which state it is."""
        self.champion.candidate.close()
        was_baseline = self.champion is self.baseline
        self.champion = self._reopened(self.champion.run.spec.recipe)
        if was_baseline:
            self.baseline = self.champion

    def _crown(self, tried: Tried) -> None:
        """Let the candidate take the champion's place."""
        assert tried.candidate is not None
        run, start = self._stored(tried.opened.run, tried.rung), monotonic()
        new = self._profiled(tried.candidate, replace(tried.opened, run=run))
        self.clock.note(is_slow(run.spec.recipe), tried.rung.seconds + monotonic() - start)
        if self.champion.candidate is not self.baseline.candidate:
            self.champion.candidate.close()
        self.champion, self.winning = new, None
        self._save(replace(self.ladder, winner_run=new.run.id))

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
            if name == last or name not in recipe.techniques or done or conflict(Recipe(rest)):
                continue
            if not self._in_time(Recipe(rest)):
                continue
            tried = self._judged(Rung(name, {}, Recipe(rest), recipe, "failed"))
            if tried.rung.outcome == "removed":
                self._crown(tried)

    def _finish(self) -> None:
        """Hold the winner against the baseline, in turns; close a ladder that has nothing left."""
        ladder = replace(self.ladder, finished=not self.ladder.left)
        if self.champion.candidate is not self.baseline.candidate:
            self.view.stage("the winner against the baseline, in turns")
            both = (self.baseline.candidate, self.champion.candidate)
            longest = step_ms(self.baseline.run)
            turns = take_turns(*both, longest, self.clock.timeout(False), self.view.stage)
            ladder = replace(ladder, before=turns.before, after=turns.after, total=turns.change)
            if self.clock.left > 0:
                self.view.stage("the winner in detail")
                ladder = replace(ladder, winner_run=self._in_detail().run.id)
        self._save(ladder)

    def _in_detail(self) -> Champion:
        """Profile the winner once more, for the report, as a Run of its own."""
        spec = self.champion.run.spec
        run = replace(self.champion.run, id=new_run_id(spec), profile=None)
        return self._profiled(self.champion.candidate, Opened(run), detail=True)

    def _reopened(self, recipe: Recipe) -> Champion:
        """Start a recipe that has passed the gate before."""
        spec = replace(self.ladder.spec, recipe=recipe)
        timeout = self.clock.timeout(is_slow(recipe))
        candidate = RemoteCandidate(spec, self.ladder.environment)
        try:
            opened = opened_or_raise(candidate, self.rules, timeout, self.view.stage)
            opened = replace(opened, run=replace(opened.run, group=self.ladder.id))
            return self._profiled(candidate, opened)
        except BaseException:
            candidate.close()
            raise

    def _profiled(
        self, candidate: RemoteCandidate, opened: Opened, detail: bool | None = None
    ) -> Champion:
        """Profile and store a candidate; in detail where memory is wanted: only that tells it."""
        if detail is None:
            detail = self.rules.objective == "memory"
        timeout = self.clock.timeout(is_slow(candidate.spec.recipe))
        return crowned(candidate, opened, self.store, timeout, self.view.stage, detail)

    def _stored(self, run: Run, rung: Rung) -> Run:
        """The Run as it goes into the store; one that the gate stopped has failed."""
        if run.status == "ok" and run.clock is None:
            run = replace(run, status="failed", reason=f"red gate: {rung.reason}")
        return replace(run, group=self.ladder.id)

    def _known_ms(self) -> dict[str, float]:
        """The champion's own times by op and phase; the baseline's where it tells none."""
        return {**self.ladder.known_ms, **self.champion.known_ms}

    def _leave(self, offer: Untried) -> None:
        """Note an offer that is not tried; the last reason counts."""
        if offer not in self.ladder.untried:
            others = tuple(u for u in self.ladder.untried if u.label != offer.label)
            self._save(replace(self.ladder, untried=(*others, offer)))

    def _in_time(self, recipe: Recipe) -> bool:
        """Whether there is time for one more candidate, and for the last turns."""
        left = self.clock.left - FINAL_SHARE * self.clock.seconds
        return left >= self.clock.expected(is_slow(recipe))

    def _save(self, ladder: Ladder) -> None:
        self.ladder = replace(ladder, seconds=self.clock.total)
        self.folder.save(self.ladder)


class _Named:
    """A view whose stages begin with the name of what is tried."""

    def __init__(self, view: View, name: str) -> None:
        self.view = view
        self.name = name
        self.say, self.rung, self.untried = view.say, view.rung, view.untried

    def stage(self, text: str) -> None:
        """Show what is being done right now."""
        self.view.stage(f"{self.name}: {text}")
