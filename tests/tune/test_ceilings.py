"""The most that an offer can gain, counted by hand."""

from dataclasses import replace

import pytest

from steplab.record import Samples
from steplab.record.budget import Budget, Category, StepBudget
from steplab.record.memory_timeline import MemoryTimeline
from steplab.record.profile import Profile
from steplab.tune.ceilings import ceiling, serves
from steplab.tune.op_times import op_times
from tests.compare.sides import run_of
from tests.report.analyses import analysis_of


def profiled(ms=10.0, wall=10.0, on_device=True, memory=None, **terms):
    categories = (Category("matmul bf16", 4.0, 8), Category("elementwise", 2.0, 30))
    step = StepBudget(0, wall, {"kernels": 6.0, **terms}, categories)
    profile = Profile((0, 1, 1, 1), ("t",), budget=Budget((step,), on_device), memory=memory)
    return replace(run_of((ms,) * 8), profile=profile)


def test_kinds_begin_with_the_name_and_count_by_their_share():
    found = ceiling({"kind:matmul": 0.5, "kind:elementwise": 1.0}, profiled(), {}, "time")
    assert found.value == pytest.approx(4.0) and found.share == pytest.approx(0.4)
    assert found.parts == "matmul 2.000 ms, elementwise 2.000 ms"


def test_what_the_profiler_added_is_no_gain():
    """9.1 ms of 12 ms waited for launches, but without the profiler a step takes 10 ms."""
    run = profiled(ms=10.0, wall=12.0, launch=9.1)
    assert ceiling({"term:launch": 1.0}, run, {}, "time").value == pytest.approx(7.1)


def test_on_a_cpu_the_profiler_slows_all_alike():
    run = profiled(ms=5.0, wall=10.0, on_device=False, launch=3.0)
    assert ceiling({"term:launch": 1.0}, run, {}, "time").value == pytest.approx(1.5)
    assert ceiling({"kind:matmul": 1.0}, run, {}, "time").value == pytest.approx(2.0)


def test_phases_come_from_the_clock_and_ops_from_what_is_known():
    run = profiled()
    assert ceiling({"phase:backward": 1.0}, run, {}, "time").value == pytest.approx(5.0)
    assert ceiling({"op:attention": 1.0}, run, {"op:attention": 3.0}, "time").value == 3.0
    assert ceiling({"phase:optimizer": 1.0}, run, {"phase:optimizer": 1.0}, "time").value == 1.0
    assert ceiling({"op:experts": 1.0}, run, {}, "time") is None


def test_nobody_beats_the_roofline():
    """Of 4 ms in products 3 have a model, and its ideal is 1 ms."""
    run = profiled()
    assert ceiling({"lost:matmul": 1.0}, run, {}, "time") is None
    step = run.profile.budget.typical
    known = (Category("matmul bf16", 4.0, 8, ideal_ms=1.0, modelled_ms=3.0), *step.categories[1:])
    budget = Budget((replace(step, categories=known),), on_device=True)
    run = replace(run, profile=replace(run.profile, budget=budget))
    assert ceiling({"lost:matmul": 1.0}, run, {}, "time").value == pytest.approx(2.0)


def test_no_more_than_the_whole_step_can_be_gained():
    run = replace(profiled(), clock=replace(profiled().clock, step=Samples((3.0,) * 6, "ms")))
    assert ceiling({"kind:matmul": 1.0}, run, {}, "time").share == 1.0


def test_memory_is_looked_up_where_it_is_wanted():
    kinds = {"weights": 30, "activations": 70}
    timeline = MemoryTimeline((0.0,), {}, {}, 100, 0.0, kinds, (), ())
    relief = {"memory:activations": 0.5, "kind:matmul": 1.0}
    found = ceiling(relief, profiled(memory=timeline), {}, "memory")
    assert found.value == 35 and found.share == pytest.approx(0.35)
    assert serves(relief, "time") and serves(relief, "memory") and serves({}, "memory")
    assert not serves({"kind:matmul": 1.0}, "memory")
    assert not serves({"memory:activations": 1.0}, "time")


def test_the_time_of_an_op_is_that_of_its_modules():
    """Two of the four kernels of a step belong to blocks.*.attention: 2 ms and 1 ms."""
    run = run_of((10.0,) * 8)
    paths = {"attention": ("blocks.0.attention", "blocks.1.attention"), "loss": ("loss",)}
    assert op_times(run, analysis_of(), paths) == {"op:attention": pytest.approx(3.0)}
    half = op_times(run_of((5.0,) * 8), analysis_of(device=False), paths)
    assert half == {"op:attention": pytest.approx(1.5)}
