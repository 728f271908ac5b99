"""From the first design of a mixture to its fastest recipe, over the real techniques."""

import pytest

from steplab.core import RunSpec
from steplab.techniques.recipes import parse_recipe
from steplab.tune.folder import LadderFolder
from steplab.tune.options import TuneOptions
from steplab.tune.progress import NullView
from steplab.tune.search import tune
from tests.tune.ladders import FakeReferences, Interrupted, NoProcesses, World
from tests.tune.simulated_gpu import H200, LINE, SEED, Clock, step_ms, use_gpu

FASTEST = parse_recipe("flagship")


class Listening(NullView):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


class SlowReferences(FakeReferences):
    """Takes what making the references takes."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(World())
        self.clock = clock
        self.made = set()

    def reference(self, shape, dtype, timeout):
        self.clock.now += (
            {"fp64": 4.0, "fp32": 2.0}.get(dtype, 6.0) if dtype not in self.made else 0.0
        )
        self.made.add(dtype)
        return ""

    def dry_run(self, spec, shape, timeout):
        self.clock.now += 1.5
        return "bf16", None


@pytest.fixture
def climb(monkeypatch, store):
    def run(recipe, minutes, view=None, is_wrong=lambda recipe: False):
        clock = Clock()
        use_gpu(monkeypatch, clock, is_wrong)
        spec = RunSpec(
            "tsmoe", {}, "flagship", batch=16, device="cuda", recipe=parse_recipe(recipe)
        )
        options = TuneOptions(minutes=minutes, begun=clock.now)
        clock.now += 20.0  # the first worker imports torch
        watching = (SlowReferences(clock), H200, view or NullView(), NoProcesses())
        ladder = tune(spec, options, store, *watching)[0]
        return ladder, clock.now

    return run


def test_the_first_design_ends_as_fast_as_the_recipe_found_by_hand(climb):
    """Three rungs of a dozen get there; the rest shows that nothing else does."""
    ladder, seconds = climb(SEED, minutes=8)
    assert [rung.label for rung in ladder.kept] == [
        "impl.*=auto",
        "precision=bf16-weights,optimizer=one-pass",
        "compile=blocks",
    ]
    assert [rung.label for rung in ladder.rungs[:3]] == [rung.label for rung in ladder.kept]
    assert step_ms(ladder.winner) <= step_ms(FASTEST) / 0.95
    assert seconds < 8 * 60 + 15 and len(ladder.rungs) < 16


def test_most_of_it_is_found_in_less_than_three_minutes(climb):
    ladder, seconds = climb(SEED, minutes=2.75)
    assert step_ms(ladder.winner) <= step_ms(FASTEST) / 0.95
    assert seconds < 180 and ladder.left


def test_where_all_implementations_at_once_are_wrong_they_are_tried_one_by_one(climb):
    def is_wrong(recipe):
        return set(recipe.techniques.get("impl", {}).values()) == {"auto"}

    ladder, _ = climb(SEED, minutes=20, is_wrong=is_wrong)
    assert ladder.rungs[0].label == "impl.*=auto" and ladder.rungs[0].outcome == "red gate"
    kept = {rung.label for rung in ladder.kept}
    assert {"impl.experts=fused", "impl.attention=cudnn", "impl.rotary=triton_rotary"} <= kept
    assert step_ms(ladder.winner) <= step_ms(FASTEST) / 0.95


def test_a_step_that_waits_is_told_so_and_gets_its_graph_once_it_does_not(climb, monkeypatch):
    """Small and launch-bound: the graph has the highest ceiling but must come after the loop."""
    monkeypatch.setattr("tests.tune.simulated_gpu.HOST", 400.0)
    said = Listening()
    ladder, _ = climb(SEED, minutes=8, view=said)
    assert said.lines == [f"the baseline waits for the device 96 times a step: {LINE} x 96"]
    assert ladder.waits == (LINE,) * 96
    assert {rung.waits for rung in ladder.rungs} <= {0, 96} and ladder.kept[0].waits == 0
    labels = [rung.label for rung in ladder.rungs]
    assert labels.index("impl.*=auto") < labels.index("cuda_graph=step")
    assert "cuda_graph=step" in [rung.label for rung in ladder.kept]


def test_what_could_not_be_compiled_is_compiled_once_the_cause_is_gone(climb, monkeypatch):
    monkeypatch.setattr("tests.tune.simulated_gpu.LOOSE", 4000.0)
    ladder, _ = climb(SEED, minutes=40)
    tried = [(rung.label, rung.outcome) for rung in ladder.rungs if "compile=" in rung.label]
    assert tried[0] == ("compile=blocks", "failed")
    assert ("compile=blocks", "kept") in tried or ("compile=whole", "kept") in tried


@pytest.mark.parametrize("host", [14.0, 400.0])
def test_nothing_gains_more_than_its_ceiling(climb, monkeypatch, host):
    """Experts one by one cost more in waits than in kernels; both go with `auto`."""
    monkeypatch.setattr("tests.tune.simulated_gpu.HOST", host)
    monkeypatch.setattr("tests.tune.simulated_gpu.LOOP", 300.0)
    ladder, _ = climb(SEED, minutes=8)
    assert ladder.rungs[0].label == "impl.*=auto" and gained(ladder.rungs[0]) > 500
    known = [rung for rung in ladder.rungs if rung.ceiling is not None and rung.gain]
    assert len(known) > 6
    assert all(gained(rung) <= 1.02 * rung.ceiling for rung in known)


@pytest.mark.parametrize("minutes", [2.2, 2.9, 8.0])
@pytest.mark.parametrize("host", [14.0, 400.0])
def test_what_auto_has_passed_over_comes_after_all_that_compiles(climb, monkeypatch, minutes, host):
    """Also where time is short: it is not spent on what hardly wins."""
    monkeypatch.setattr("tests.tune.simulated_gpu.HOST", host)
    ladder, _ = climb(SEED, minutes=minutes)
    labels = [rung.label for rung in ladder.rungs if rung.change]
    order = [label.startswith("impl.") for label in labels[1:]]
    assert labels[0] == "impl.*=auto" and order == sorted(order)
    assert not any(order) or "compile.mode=max-autotune-no-cudagraphs" in labels
    assert any(order) or any(label.startswith("impl.attention=") for label in ladder.left)


def test_what_takes_long_to_try_is_not_begun_where_it_cannot_end(climb):
    """Tuning every product takes minutes; a timeout would spend them for nothing."""
    tuned = "compile.mode=max-autotune-no-cudagraphs"
    short, _ = climb(SEED, minutes=4)
    assert tuned in short.left and tuned not in [rung.label for rung in short.rungs]
    enough, _ = climb(SEED, minutes=12)
    assert tuned in [rung.label for rung in enough.rungs]


def test_the_time_of_an_op_is_that_of_the_recipe_that_told_it_last(climb):
    """Attention took 150 ms in the first design and 51 ms since `auto`; compiled blocks are mum."""
    ladder, _ = climb(SEED, minutes=8)
    attention = [rung for rung in ladder.rungs if rung.label.startswith("impl.attention=")]
    assert attention and all("attention 51.00 ms" in rung.ceiling_parts for rung in attention)
    assert ladder.known_ms["op:attention"] == 51.0


@pytest.mark.parametrize("after", [1, 3])
def test_a_search_that_goes_on_knows_what_winners_told(climb, after):
    """After three rungs blocks are compiled: of their ops only the recipe before has told."""
    with pytest.raises(KeyboardInterrupt):
        climb(SEED, minutes=8, view=Interrupted(after))
    ladder, _ = climb(SEED, minutes=2.2)
    assert len(ladder.rungs) >= after and ladder.known_ms["op:attention"] == 51.0


def test_of_an_op_that_changed_nothing_is_known_until_the_winner_is_profiled(
    climb, monkeypatch, store
):
    promoted = []

    def interrupted(self, tried):
        promoted.append(tried.rung.label)
        raise KeyboardInterrupt

    monkeypatch.setattr("steplab.tune.climb.Climb._promote", interrupted)
    with pytest.raises(KeyboardInterrupt):
        climb(SEED, minutes=8)
    (path,) = (store.root / "ladders").glob("*/ladder.json")
    left = LadderFolder(path.parent).load()
    assert promoted == ["impl.*=auto"] and left.winner == left.rungs[0].recipe
    assert set(left.known_ms) == {"phase:optimizer"}


def gained(rung):
    """Milliseconds a step."""
    return -rung.gain.value * rung.before.median
