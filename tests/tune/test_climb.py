"""The search over a simulated step: what it tries, keeps, takes out, and goes on from."""

from dataclasses import dataclass, replace

import pytest

from steplab.core import PLAIN, Recipe, RunSpec, Samples
from steplab.core.ladder import BatchTrial, Ladder, Rung
from steplab.techniques.context import Suggestion
from steplab.techniques.recipes import parse_recipe
from steplab.techniques.technique import Stage
from steplab.tune.climb import note_seconds
from steplab.tune.options import TuneOptions
from steplab.tune.progress import NullView, SearchClock
from steplab.tune.search import tune
from tests.tune.ladders import (
    ENVIRONMENT,
    FakeTechnique,
    Interrupted,
    NoProcesses,
    World,
    use_clock,
    use_techniques,
    use_world,
)

SPEC = RunSpec("gpt", {"context": 128, "width": 64}, "tiny")
MATMUL, LAUNCH, SMALL = {"kind:matmul": 1.0}, {"term:launch": 1.0}, {"kind:elementwise": 0.01}


@pytest.fixture
def climb(monkeypatch, store):
    """Return a function that climbs in a world; every process it started must have ended."""

    def run(world, techniques, view=None, **options) -> Ladder:
        use_techniques(monkeypatch, techniques)
        references = use_world(monkeypatch, world, [])
        try:
            watching = (references, ENVIRONMENT, view or NullView(), NoProcesses())
            return tune(SPEC, TuneOptions(**options), store, *watching)[0]
        finally:
            assert world.alive == 0

    return run


def outcomes(ladder):
    return {rung.label: rung.outcome for rung in ladder.rungs}


def test_what_wins_is_kept_and_what_loses_is_not(climb):
    world = World({"quick": 0.5, "slower": 1.3, "same": 1.0})
    techniques = {name: FakeTechnique(MATMUL) for name in ("quick", "slower", "same")}
    ladder = climb(world, techniques)
    assert outcomes(ladder) == {
        "quick=true": "kept",
        "slower=true": "no gain",
        "same=true": "no gain",
    }
    assert ladder.winner.label == "quick=true" and ladder.finished
    assert ladder.total is not None and ladder.total.value == pytest.approx(-0.5, abs=0.01)


def test_the_highest_ceiling_is_tried_first_and_a_low_one_never(climb):
    techniques = {"a": FakeTechnique(LAUNCH), "b": FakeTechnique(MATMUL), "c": FakeTechnique(SMALL)}
    ladder = climb(World(), techniques)
    assert [rung.label for rung in ladder.rungs] == ["b=true", "a=true"]
    assert [suggestion.label for suggestion in ladder.untried] == ["c=true"]
    assert "0.2 %" in ladder.untried[0].reason
    assert ladder.rungs[0].ceiling == pytest.approx(50, rel=0.01)  # 100 ms, as the turns have it
    assert "matmul" in ladder.rungs[0].ceiling_parts


def test_a_technique_of_which_nobody_knows_the_ceiling_is_tried_too(climb):
    ladder = climb(World({"new": 0.8}), {"new": FakeTechnique({}), "old": FakeTechnique(MATMUL)})
    assert [rung.label for rung in ladder.rungs] == ["old=true", "new=true"]
    assert ladder.winner.label == "new=true"


def test_on_a_cpu_modules_are_looked_at_once(climb):
    world = World({"quick": 0.5})
    climb(world, {"quick": FakeTechnique(MATMUL)})
    assert world.details == ["modules", "none", "all"]


def test_over_a_red_gate_there_is_no_speed_up(climb):
    ladder = climb(World({"wrong": 0.1}, red={"wrong"}), {"wrong": FakeTechnique(MATMUL)})
    (rung,) = ladder.rungs
    assert rung.outcome == "red gate" and rung.gain is None and rung.after is None
    assert "wrong" in rung.reason and rung.remedy
    assert ladder.winner.label == "plain" and ladder.total is None


def test_a_winner_whose_curves_leave_those_of_the_plain_step_is_red(climb):
    world = World({"a": 0.5, "b": 0.8}, diverging={"a"})
    ladder = climb(world, {"a": FakeTechnique(MATMUL), "b": FakeTechnique(MATMUL)})
    rungs = {rung.technique: rung for rung in ladder.rungs}
    assert rungs["a"].outcome == "red gate" and rungs["a"].gain is None
    assert rungs["b"].outcome == "kept" and set(ladder.winner.techniques) == {"b"}
    assert world.alive == 0


@pytest.mark.parametrize("status", ["oom", "crashed", "failed", "timeout"])
def test_a_rung_that_breaks_is_a_row_and_the_ladder_goes_on(climb, status):
    world = World({"good": 0.5}, broken={"bad": status})
    ladder = climb(world, {"bad": FakeTechnique(MATMUL), "good": FakeTechnique(LAUNCH)})
    assert outcomes(ladder) == {"bad=true": "failed", "good=true": "kept"}
    assert "it broke" in ladder.rungs[0].reason and ladder.rungs[0].remedy
    assert status == "failed" or ladder.rungs[0].reason.startswith(status)


@dataclass(frozen=True)
class Form:
    form: int = 1


class ManyForms(FakeTechnique):
    """Suggests four forms of itself."""

    settings = Form

    def suggest(self, context, current):
        return [] if current else [Suggestion({"form": n}, self.savings) for n in range(1, 5)]


def test_what_fails_twice_for_one_reason_is_not_tried_in_other_forms(climb):
    ladder = climb(World(broken={"bad": "failed"}), {"bad": ManyForms(MATMUL)})
    assert [rung.outcome for rung in ladder.rungs] == ["failed"] * 2
    reasons = {untried.reason for untried in ladder.untried}
    assert reasons == {"bad=1 and bad=2 failed alike: it broke"} and len(ladder.untried) == 2


def test_what_failed_is_known_as_long_as_the_model_is_the_same(climb):
    """Another update does not change what the model's own lines refuse; another op may."""
    for stage, known in ((Stage.OPTIMIZER, {"bad=true"}), (Stage.IMPLEMENTATION, set())):
        seen = {}

        class Bad(FakeTechnique):
            def suggest(self, context, current, seen=seen):
                seen.setdefault(context.recipe.label, set(context.failed))  # when it is new
                return super().suggest(context, current)

        class Good(FakeTechnique):
            pass

        Good.stage = stage
        world = World({"good": 0.5}, broken={"bad": "failed"})
        climb(world, {"bad": Bad(MATMUL), "good": Good(LAUNCH)})
        assert seen["good=true"] == known


def test_what_ran_out_of_time_is_not_offered_in_pieces(climb):
    offered = []

    class Pieces(FakeTechnique):
        def suggest(self, context, current):
            offered.append(frozenset(context.failed))
            return super().suggest(context, current)

    climb(World(broken={"bad": "timeout"}), {"bad": Pieces(MATMUL)})
    assert set(offered) == {frozenset()}
    climb(World(broken={"bad": "failed"}), {"bad": Pieces(MATMUL)})
    assert frozenset({"bad=true"}) in offered


def test_no_other_form_of_what_ran_out_of_time_is_tried(climb):
    ladder = climb(World(broken={"bad": "timeout"}), {"bad": ManyForms(MATMUL)})
    assert [rung.outcome for rung in ladder.rungs] == ["failed"]
    assert {untried.reason for untried in ladder.untried} == {"bad=1 ran out of time"}
    assert len(ladder.untried) == 3


def test_what_may_run_out_of_time_leaves_some_for_what_is_quicker(climb, monkeypatch):
    monkeypatch.setattr(
        SearchClock, "expected", lambda self, slow, warm=False: 70.0 if slow else 20.0
    )
    alone, beside = World(), World()
    slow, little = FakeTechnique(MATMUL, slow=True), FakeTechnique({"kind:elementwise": 0.2})
    climb(alone, {"slow": slow})
    climb(beside, {"slow": slow, "quick": little})
    assert beside.opened[1:] == ["slow=true", "quick=true"]
    left = alone.timeouts["slow=true"] - beside.timeouts["slow=true"]
    assert left == pytest.approx(20.0, abs=5.0)


def test_a_budget_is_a_budget(monkeypatch):
    """A candidate gets what is left, less the last turns; what must be done gets a minute."""
    monkeypatch.setattr("steplab.tune.progress.monotonic", lambda: 100.0)
    clock = SearchClock(120.0, begun=0.0)
    assert clock.candidate_timeout(8.0) == 12.0 and clock.timeout == 60.0
    assert SearchClock(105.0, begun=0.0).candidate_timeout(8.0) == 10.0


def test_a_worker_lost_in_the_turns_costs_its_rung_only(climb):
    world = World({"good": 0.5}, lost_in_turns={"bad"})
    ladder = climb(world, {"bad": FakeTechnique(MATMUL), "good": FakeTechnique(LAUNCH)})
    assert outcomes(ladder) == {"bad=true": "failed", "good=true": "kept"}


def test_what_cannot_run_here_is_told_and_looked_at_again_on_another_recipe(climb):
    world = World({"good": 0.5}, refused={"never"})
    ladder = climb(world, {"never": FakeTechnique(MATMUL), "good": FakeTechnique(LAUNCH)})
    assert outcomes(ladder) == {"good=true": "kept"}
    (suggestion,) = ladder.untried
    assert suggestion.reason == "needs something else" and suggestion.refused_on == "good=true"


def test_one_refusal_is_told_once_and_without_the_remedy_of_a_recipe_of_ones_own(climb):
    told = []

    class View(NullView):
        def untried(self, untried):
            told.append((untried.label, untried.reason))

    world = World({"good": 0.5}, refused={"never"})
    techniques = {"never": FakeTechnique(MATMUL), "good": FakeTechnique(LAUNCH)}
    climb(world, techniques, View())
    assert told == [("never=true", "needs something else")]


def test_what_the_champion_has_compiled_is_expected_to_be_compiled_quickly():
    clock = SearchClock(600.0, begun=0.0)
    blocks = parse_recipe("compile=blocks")
    fused = parse_recipe("compile=blocks,optimizer=fused")
    turns = Samples((10.0,) * 3, "ms")
    cold = Rung("compile", {"scope": "blocks"}, blocks, PLAIN, "kept", before=turns, seconds=36.0)
    note_seconds(clock, replace(cold, cold_seconds=25.0, warm_seconds=3.0))
    assert clock.expected(slow=True) == 36.0 and clock.expected(slow=True, warm=True) == 14.0
    warm = Rung("optimizer", {"impl": "fused"}, fused, blocks, "kept", before=turns, seconds=12.0)
    note_seconds(clock, warm)
    assert clock.expected(slow=True) == 36.0 and clock.expected(slow=True, warm=True) == 13.0
    assert clock.expected(slow=False, warm=True) == 10.0, "nobody has seen a plain one yet"
    slow_step = SearchClock(600, 0.0)
    note_seconds(slow_step, replace(cold, cold_seconds=5.0, warm_seconds=1.0))  # 32 without them
    assert slow_step.expected(slow=False) == 24.0


def test_the_time_of_references_and_of_refusals_is_not_what_a_candidate_takes():
    recipe, turns = parse_recipe("precision=bf16"), Samples((10.0,) * 3, "ms")
    rung = Rung("precision", {"dtype": "bf16"}, recipe, PLAIN, "kept", seconds=30.0)
    rung = replace(rung, parts={"computing": 20.0, "comparing": 6.0, "turns": 4.0})
    refused = replace(rung, outcome="failed", reason="it cannot be compiled")
    late = replace(rung, outcome="failed", reason="timeout: no answer within 10 s")
    for seen, taken in ((replace(rung, before=turns), [10.0]), (refused, []), (late, [10.0])):
        clock = SearchClock(600.0, begun=0.0)
        note_seconds(clock, seen)
        assert clock.taken[False] == taken


def test_a_rung_that_stopped_paying_is_taken_out(climb):
    world = World({"first": 0.9, "second": 0.5}, together={frozenset(("first", "second")): 1.2})
    ladder = climb(world, {"first": FakeTechnique(MATMUL), "second": FakeTechnique(LAUNCH)})
    assert outcomes(ladder) == {
        "first=true": "kept",
        "second=true": "kept",
        "without first": "removed",
    }
    assert ladder.winner.label == "second=true"


def test_a_rung_that_still_pays_stays(climb):
    world = World({"first": 0.9, "second": 0.5})
    ladder = climb(world, {"first": FakeTechnique(MATMUL), "second": FakeTechnique(LAUNCH)})
    assert outcomes(ladder)["without first"] == "needed"
    assert ladder.winner.label == "first=true,second=true"


def test_what_lost_is_tried_again_when_its_share_has_grown(climb, monkeypatch):
    """Half of the step is products at first; once nothing waits, all of it is."""
    from steplab.tune import ceilings

    world = World({"late": 1.1, "graph": 0.3}, together={frozenset(("late", "graph")): 0.5})
    shares = {"plain": 0.3, "graph=true": 0.9}
    known = ceilings._size

    def size(part, run, more):
        if part == "kind:matmul":
            return shares.get(run.spec.recipe.label, 0.0) * ceilings.step_ms(run)
        return known(part, run, more)

    monkeypatch.setattr(ceilings, "_size", size)
    techniques = {"late": FakeTechnique(MATMUL), "graph": FakeTechnique({"term:launch": 0.7})}
    ladder = climb(world, techniques)
    tried = [(rung.label, rung.outcome) for rung in ladder.rungs if rung.change]
    assert tried == [("late=true", "no gain"), ("graph=true", "kept"), ("late=true", "kept")]


def test_the_budget_ends_the_search_and_the_next_call_goes_on(climb):
    world = World({"a": 0.5})
    techniques = {"a": FakeTechnique(MATMUL), "slow": FakeTechnique(LAUNCH, slow=True)}
    first = climb(world, techniques, minutes=0.3)  # compiling is expected to take 20 s
    assert [rung.label for rung in first.rungs] == ["a=true"]
    assert first.left == ("slow=true",) and not first.finished
    assert first.stopped == (
        "the most promising of what is left takes longer than the 18 s that were left of 0.3 "
        "minutes"
    )
    again = climb(world, techniques, minutes=0.3)
    assert again.left and again.stopped == (
        "nothing of what is left fits into 0.3 minutes; try a larger --budget"
    )
    second = climb(world, techniques, minutes=8)
    assert second.id == first.id and second.finished
    assert [rung.label for rung in second.rungs][:2] == ["a=true", "slow=true"]


def test_a_search_that_has_tried_nothing_takes_what_there_is_time_for(climb):
    """The slow one promises fifty times as much; in half a minute it cannot be had."""
    world = World({"small": 0.9})
    small = FakeTechnique({"kind:matmul": 0.05})
    slow = FakeTechnique({"term:launch": 1.0, "kind:matmul": 1.0}, slow=True)
    ladder = climb(world, {"small": small, "slow": slow}, minutes=0.3)
    assert [rung.label for rung in ladder.rungs] == ["small=true"]
    assert ladder.left == ("slow=true",)


def test_what_ran_out_of_time_is_told_at_the_end(climb):
    ladder = climb(World(broken={"a": "timeout"}), {"a": FakeTechnique(MATMUL)})
    assert ladder.stopped.startswith("nothing else is left that could gain 2.0 %; 1 ran out of ")
    assert "a larger --budget" in ladder.stopped


def test_an_interrupted_search_goes_on_where_it_was(climb):
    world = World({"a": 0.5, "b": 0.8})
    techniques = {"a": FakeTechnique(MATMUL), "b": FakeTechnique(LAUNCH)}
    with pytest.raises(KeyboardInterrupt):
        climb(world, techniques, Interrupted(after=1))
    world.opened.clear()
    ladder = climb(world, techniques)
    assert world.opened[:3] == ["plain", "a=true", "a=true,b=true"]  # the winner is opened again
    assert ladder.winner.label == "a=true,b=true" and ladder.finished
    again = climb(world, techniques)
    assert again.id != ladder.id


def test_a_study_of_batches_that_is_interrupted_is_made_up_for_by_the_same_command(
    climb, monkeypatch
):
    """`--batch auto` looks at larger batches last; until then the ladder is not finished."""
    from steplab.tune import search

    def interrupted(self):
        raise KeyboardInterrupt

    world, techniques = World({"a": 0.5}), {"a": FakeTechnique(MATMUL)}
    with monkeypatch.context() as patch:
        patch.setattr(search.LargerBatches, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            climb(world, techniques, larger_batches=True)
    world.opened.clear()
    found = (BatchTrial(PLAIN, 8, "best so far"),)
    monkeypatch.setattr(search.LargerBatches, "run", lambda self: found)
    ladder = climb(world, techniques, larger_batches=True)
    assert ladder.batches == found and ladder.finished
    assert world.opened == ["plain", "a=true"]  # nothing is tried again


def test_a_winner_that_the_script_has_already_is_not_compared_with_itself(climb):
    own = Recipe({"a": {"on": True}})
    ladder = climb(World({"a": 0.5}), {"a": FakeTechnique(MATMUL)}, own=own)
    assert ladder.winner == own and ladder.has_winner_already and ladder.peer is None
    other = climb(World(), {"a": FakeTechnique(MATMUL)}, own=own)
    assert not other.has_winner_already and other.peer is not None


def test_memory_may_be_the_objective(climb):
    world = World({"lean": 0.7, "quick": 0.5})
    techniques = {"lean": FakeTechnique({}), "quick": FakeTechnique(MATMUL)}
    ladder = climb(world, techniques, objective="memory")
    assert outcomes(ladder) == {"lean=true": "kept"}
    assert "at the peak" in ladder.rungs[0].reason


def test_a_small_gain_on_a_cpu_must_come_back_with_new_processes(climb, monkeypatch):
    world = World({"luck": 0.97})
    ladder = climb(world, {"luck": FakeTechnique(MATMUL)})
    assert ladder.rungs[0].outcome == "kept" and "confirmed" in ladder.rungs[0].reason
    assert world.opened.count("luck=true") == 2 and world.opened.count("plain") == 2
    # Lucky in its first process only.
    lucky = World({"luck": 0.97})
    known = World.ms
    monkeypatch.setattr(
        World, "ms", lambda self, names: 100.0 if len(self.opened) > 2 else known(self, names)
    )
    ladder = climb(lucky, {"luck": FakeTechnique(MATMUL)})
    assert ladder.rungs[0].outcome == "no gain" and "not confirmed" in ladder.rungs[0].reason


def test_more_than_a_ceiling_allows_must_come_back_with_new_processes(climb, monkeypatch):
    """A sixth of the step is elementwise: a fifth of that cannot be 40 % of the step."""
    little = {"kind:elementwise": 0.2}
    known = World.ms
    monkeypatch.setattr(
        World, "ms", lambda self, names: 100.0 if len(self.opened) > 2 else known(self, names)
    )
    ladder = climb(World({"luck": 0.6}), {"luck": FakeTechnique(little)})
    assert ladder.rungs[0].outcome == "no gain" and "not confirmed" in ladder.rungs[0].reason


def test_a_small_gain_for_whose_confirmation_there_is_no_time_is_not_kept(climb, monkeypatch):
    """Two compiled processes would take 60 of 150 seconds, and then the time is over."""
    for slow, outcome in ((True, "cannot tell"), (False, "kept")):
        world = World({"luck": 0.97}, open_seconds=30.0 if slow else 2.0)
        use_clock(monkeypatch, world)
        technique = FakeTechnique(MATMUL, slow=slow)
        ladder = climb(world, {"luck": technique}, minutes=1.5 if slow else 2.5, begun=0.0)
        assert outcomes(ladder) == {"luck=true": outcome}
        assert world.opened.count("luck=true") == (1 if slow else 2)
        if slow:
            assert "no time" in ladder.rungs[0].reason and "--budget" in ladder.rungs[0].remedy


def test_a_ceiling_is_in_the_time_of_the_turns(climb, monkeypatch):
    """The baseline was profiled at 100 ms in a bad moment; in the turns its step takes 20 ms."""
    known = World.ms

    def calmer(self, names):
        return known(self, names) * (0.2 if len(self.opened) > 1 else 1.0)

    monkeypatch.setattr(World, "ms", calmer)
    (rung,) = climb(World({"quick": 0.8}), {"quick": FakeTechnique(MATMUL)}).rungs
    assert rung.before.median == pytest.approx(20, rel=0.01)
    assert rung.ceiling_share == pytest.approx(0.5)
    assert rung.ceiling == pytest.approx(10, rel=0.01)


def test_of_a_rung_whose_interval_stays_wide_nobody_can_tell(climb, monkeypatch):
    """Half or twice the time, from round to round: it is not kept, and the ladder goes on."""
    swings = iter((0.5, 2.0) * 100)
    known = World.ms

    def noisy(self, names):
        return known(self, names) * (next(swings) if "wild" in names else 1.0)

    monkeypatch.setattr(World, "ms", noisy)
    ladder = climb(
        World({"good": 0.5}), {"wild": FakeTechnique(MATMUL), "good": FakeTechnique(LAUNCH)}
    )
    assert outcomes(ladder) == {"wild=true": "cannot tell", "good=true": "kept"}
    assert ladder.rungs[0].reason.startswith("cannot tell")


def test_a_gain_of_half_a_per_cent_is_none(climb):
    ladder = climb(World({"tiny": 0.995}), {"tiny": FakeTechnique(MATMUL)})
    assert outcomes(ladder) == {"tiny=true": "no gain"}


def test_nothing_is_taken_out_that_may_still_pay(climb, monkeypatch):
    """Without `first` a step takes anything from 0.9 to 1.3 of its time: nobody can tell."""
    world = World({"first": 0.85, "second": 0.5})
    known = World.ms

    def noisy(self, names):
        ms = known(self, names)
        swings = iter((0.9, 1.3) * 100)
        self.swings = getattr(self, "swings", swings)
        alone = names == {"second"} and any("first" in label for label in self.opened)
        return ms * next(self.swings) if alone and len(self.opened) > 3 else ms

    monkeypatch.setattr(World, "ms", noisy)
    ladder = climb(world, {"first": FakeTechnique(MATMUL), "second": FakeTechnique(LAUNCH)})
    assert outcomes(ladder)["without first"] == "needed"
