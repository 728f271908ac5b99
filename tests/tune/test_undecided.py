"""What is left of a budget goes into what is undecided, by a clock that nothing but steps moves."""

import pytest

from steplab.core import PLAIN, Recipe, RunSpec
from steplab.core.comparison import Change
from steplab.core.ladder import Ladder, Rung
from steplab.tune.options import TuneOptions
from steplab.tune.progress import NullView
from steplab.tune.report import total_line
from steplab.tune.search import tune
from steplab.workers.alternate import LATE_LOOKS, PEEK_CONFIDENCE, USUAL_ROUNDS
from tests.tune.ladders import (
    BASE_MS,
    ENVIRONMENT,
    FakeTechnique,
    NoProcesses,
    World,
    candidates_of,
    use_clock,
    use_techniques,
    use_world,
)

SPEC = RunSpec("gpt", {"context": 128, "width": 64}, "tiny")
MATMUL, LAUNCH = {"kind:matmul": 1.0}, {"term:launch": 1.0}
EVEN = Change(0.0, -0.1, 0.1, 0.95, detectable=None)
ONE = {"it": FakeTechnique(MATMUL)}


@pytest.fixture
def climb(monkeypatch, store):
    """Return a function that climbs in a world with its own clock."""

    def run(world, techniques=ONE, minutes=4.0, **options) -> Ladder:
        use_techniques(monkeypatch, techniques)
        use_clock(monkeypatch, world)
        references = use_world(monkeypatch, world, [])
        watching = (references, ENVIRONMENT, NullView(), NoProcesses())
        asked = TuneOptions(minutes=minutes, begun=world.now, **options)
        ladder = tune(SPEC, asked, store, *watching)[0]
        assert world.alive == 0
        return ladder

    return run


def tried(ladder):
    return [(rung.label, rung.outcome) for rung in ladder.rungs]


def rounds(samples):
    return len(samples.values) // 3


def test_the_last_comparison_goes_on_until_it_is_decided(climb):
    """The rung won in three quiet rounds; then the machine became busy."""
    ladder = climb(World({"it": 0.85}, noise=0.2, quiet_rounds=6, open_seconds=5.0, seed=4))
    assert tried(ladder) == [("it=true", "kept")]
    assert USUAL_ROUNDS < rounds(ladder.before) == rounds(ladder.after) <= LATE_LOOKS[-1]
    assert ladder.total.high < 0 and ladder.total.confidence == PEEK_CONFIDENCE
    assert total_line(ladder).startswith("it=true: 1.")


def test_it_ends_with_the_budget(climb):
    """25 of 30 seconds are gone when it begins."""
    world = World({"it": 0.85}, noise=0.4, quiet_rounds=6, open_seconds=12.0)
    ladder = climb(world, minutes=0.5)
    assert rounds(ladder.before) <= USUAL_ROUNDS and ladder.total.high > 0
    assert "no longer distinguishable" in total_line(ladder)


def test_a_winner_that_gains_nothing_is_told_as_such(climb, monkeypatch):
    """Its rung had luck: it is as fast as the baseline. The interval is within 2 % at last."""
    known = World.ms
    monkeypatch.setattr(
        World, "ms", lambda self, names: known(self, names) if self.quiet_rounds > 0 else BASE_MS
    )
    ladder = climb(World({"it": 0.85}, noise=0.03, quiet_rounds=6, open_seconds=5.0))
    assert rounds(ladder.before) > USUAL_ROUNDS and -0.02 < ladder.total.low < 0
    assert "surely gains less than 2.0 % over the baseline" in total_line(ladder)


def test_a_rung_of_which_nobody_could_tell_is_tried_again_and_wins(climb):
    world = World({"it": 0.8}, noise=0.3, open_seconds=5.0, seed=4)
    ladder = climb(world)
    assert tried(ladder) == [("it=true", "cannot tell"), ("it=true", "kept")]
    first, second = ladder.rungs
    assert rounds(first.before) == USUAL_ROUNDS < rounds(second.before)
    assert second.gain.confidence == PEEK_CONFIDENCE
    assert world.opened == ["plain", "it=true", "plain", "it=true"]  # both sides anew
    assert ladder.winner.label == "it=true" and not ladder.undecided and ladder.total is not None


def test_what_won_at_last_is_climbed_on_from(climb):
    class OnTop(FakeTechnique):
        def suggest(self, context, current):
            below = context.recipe.techniques
            return super().suggest(context, current) if "it" in below else []

    techniques = {"it": FakeTechnique(MATMUL), "more": OnTop(LAUNCH)}
    world = World({"it": 0.8, "more": 0.2}, noise=0.3, open_seconds=5.0, seed=4)
    ladder = climb(world, techniques, minutes=8.0)
    wanted = [("it=true", "cannot tell"), ("it=true", "kept"), ("more=true", "kept")]
    assert tried(ladder)[:3] == wanted and ladder.winner.label == "it=true,more=true"
    assert ladder.total.value < -0.7  # of both


def test_equal_steps_end_with_nothing_to_gain(climb):
    world = World(noise=0.04, open_seconds=5.0)
    ladder = climb(world)
    assert tried(ladder) == [("it=true", "cannot tell"), ("it=true", "no gain")]
    assert ladder.rungs[1].reason.startswith("surely gains less than 2.0 %")
    assert total_line(ladder) == "no recipe beats the baseline; it stays as it is"
    assert not ladder.undecided


def test_two_tries_are_all(climb):
    world = World(noise=1.0, open_seconds=5.0)
    ladder = climb(world, minutes=60.0)
    assert tried(ladder) == [("it=true", "cannot tell")] * 2
    assert rounds(ladder.rungs[1].before) == LATE_LOOKS[-1]
    assert total_line(ladder) == "no recipe surely beats the baseline; it=true is undecided"


def test_without_time_there_is_one(climb):
    ladder = climb(World(noise=0.3, open_seconds=10.0), minutes=0.6)
    assert tried(ladder) == [("it=true", "cannot tell")]


def test_larger_batches_have_the_rest_of_the_time(climb, monkeypatch):
    monkeypatch.setattr("steplab.tune.search.LargerBatches.run", lambda self: ())
    ladder = climb(World(noise=0.3, open_seconds=5.0), larger_batches=True)
    assert tried(ladder) == [("it=true", "cannot tell")]


def test_a_small_gain_that_other_processes_found_before_is_confirmed(climb):
    """There was no time for two processes more, which may take a fifth of the budget."""
    world = World({"it": 0.96}, open_seconds=20.0)
    ladder = climb(world, {"it": FakeTechnique(MATMUL, slow=True)}, minutes=3.0)
    assert tried(ladder) == [("it=true", "cannot tell"), ("it=true", "kept")]
    assert "no time" in ladder.rungs[0].reason
    assert ladder.rungs[1].reason.endswith("found before by other processes")
    assert world.opened.count("plain") == world.opened.count("it=true") == 2


def test_a_small_gain_that_nobody_found_before_needs_other_processes(climb):
    world = World({"it": 0.95}, noise=0.06, open_seconds=2.0, seed=4)
    ladder = climb(world)
    assert tried(ladder) == [("it=true", "cannot tell"), ("it=true", "kept")]
    assert ladder.rungs[1].reason.endswith("confirmed by new processes")
    assert world.opened.count("it=true") == 3  # the last one to confirm it


def test_one_that_runs_out_of_time_leaves_enough_for_another(climb):
    """It ends a few seconds after its time: those are not taken from the next one."""
    techniques = {
        "slow": FakeTechnique(MATMUL, slow=True),
        "quick": FakeTechnique({"kind:elementwise": 0.8}),
    }
    world = World({"quick": 0.9}, broken={"slow": "timeout"}, open_seconds=3.0)
    ladder = climb(world, techniques, minutes=2.0)
    assert tried(ladder) == [("slow=true", "failed"), ("quick=true", "kept")]


def test_a_refusal_does_not_tell_what_a_compilation_takes(climb):
    """It comes after a few seconds; its other form would then seem to take no longer."""

    class InPieces(FakeTechnique):
        def suggest(self, context, current):
            return super().suggest(context, current) if "refused=true" in context.failed else []

    techniques = {
        "refused": FakeTechnique(MATMUL, slow=True),
        "pieces": InPieces(MATMUL, slow=True),
        "quick": FakeTechnique({"kind:elementwise": 0.8}),
    }
    broken = {"refused": "failed", "pieces": "timeout"}
    ladder = climb(World({"quick": 0.9}, broken=broken, open_seconds=3.0), techniques, minutes=2.0)
    assert [rung.label for rung in ladder.rungs] == ["refused=true", "pieces=true", "quick=true"]


def test_whether_a_gain_is_confirmed_is_decided_by_what_its_own_rung_took(climb, monkeypatch):
    """The rung before took long; two processes like this one fit into a fifth of the budget."""
    techniques = {"long": FakeTechnique(MATMUL), "short": FakeTechnique({"kind:elementwise": 0.8})}
    world = World({"long": 0.7, "short": 0.95})
    Candidate = candidates_of(world)
    opening = Candidate.open

    def slower(self, *arguments):
        world.now += 40.0 if self.spec.recipe.label == "long=true" else 2.0
        return opening(self, *arguments)

    monkeypatch.setattr("tests.tune.ladders.candidates_of", lambda world: Candidate)
    monkeypatch.setattr(Candidate, "open", slower)
    ladder = climb(world, techniques, minutes=2.0)
    assert tried(ladder)[:2] == [("long=true", "kept"), ("short=true", "kept")]
    assert ladder.rungs[1].reason.endswith("confirmed by new processes")


def test_a_try_that_failed_decides_nothing():
    def rung(outcome):
        recipe = Recipe({"it": {"on": True}})
        return Rung("it", {"on": True}, recipe, PLAIN, outcome, gain=EVEN)

    def undecided(*outcomes):
        rungs = tuple(map(rung, outcomes))
        ladder = Ladder("id", SPEC, ENVIRONMENT, rungs=rungs)
        return [one.outcome for one in ladder.undecided]

    assert undecided("cannot tell") == undecided("cannot tell", "failed") == ["cannot tell"]
    assert undecided("cannot tell", "no gain") == undecided("cannot tell", "kept") == []
