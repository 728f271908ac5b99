"""The checks that a Run answers by itself."""

from dataclasses import replace

from steplab.core import Compilation, Memory, Recompile
from steplab.core.ladder import Check, worst_check
from steplab.tune.rung import _UNVERIFIED, remedy_for_checks
from steplab.verify.checks import run_checks
from tests.compare.sides import run_of


def names_of_red(run, waits=(), allowed=(), limit=None):
    return [check.name for check in run_checks(run, waits, allowed, limit) if not check.passed]


def test_a_sound_run_is_green():
    assert names_of_red(run_of()) == []


def test_a_wait_that_the_recipe_below_has_not_is_red():
    run = run_of(device="cuda")
    assert names_of_red(run, ["a.py:1"], []) == ["no synchronization"]
    assert names_of_red(run, ["a.py:1", "a.py:1"], ["a.py:1"]) == ["no synchronization"]
    told = run_checks(run, ["a.py:1", "b.py:2"], ["a.py:1"], None)[0].detail
    assert told == "the host waits 2 times a step, 1 before; new: b.py:2 x 1"


def test_nobody_is_red_for_waits_that_were_there_before():
    """A step whose products in fp32 read their offsets on the host, with a fused update."""
    own = ["grouped_mm/loop.py:34"] * 18
    assert names_of_red(run_of(device="cuda"), own, own) == []
    told = run_checks(run_of(device="cuda"), own[:6], own, None)[0].detail
    assert told.startswith("no more than before") and "grouped_mm/loop.py:34 x 6" in told
    assert names_of_red(run_of(device="cuda"), [*own, "scaler.py:9"], own) == ["no synchronization"]
    assert names_of_red(run_of(), ["a.py:1"], []) == [], "a CPU waits for nobody"


def test_graphs_compiled_while_the_clock_ran_are_red():
    compiled = Compilation(3, 1, recompiles=(Recompile("forward", "size mismatch"),))
    run = replace(run_of(), compilation=compiled)
    assert names_of_red(run) == ["no new graphs after warm-up"]
    assert "size mismatch" in run_checks(run, (), (), None)[1].detail
    assert names_of_red(replace(run_of(), compilation=Compilation(3, 0))) == []


def test_memory_beyond_the_limit_is_red():
    run = replace(run_of(), memory=Memory(0, 2**30, 2**31, 2**33, "cuda allocator"))
    assert names_of_red(run) == []
    assert names_of_red(run, limit=2**30) == ["memory within the limit"]
    assert names_of_red(replace(run, memory=None), limit=2**30) == ["memory within the limit"]


def test_work_that_the_steps_do_not_show_is_red():
    run = run_of()
    late = replace(run, clock=replace(run.clock, window_ms=1.5 * run.clock.window_ms))
    assert names_of_red(late) == ["clocks agree"]


def test_the_worst_red_check_is_shown():
    loss, gradients = Check("loss", False, "", 3.0), Check("gradients", False, "", 5e4)
    green = Check("update", True, "", 0.9)
    assert worst_check([green, loss, gradients]) is gradients
    assert worst_check([loss, Check("weights", False, "", float("inf"))]).name == "weights"
    assert worst_check([green]) is None
    assert remedy_for_checks([loss, Check("data", False, "unverified: other", 9.0)]) == _UNVERIFIED
