"""The most that a suggestion can gain, counted by hand."""

from dataclasses import replace

import numpy as np
import pytest

from steplab.core import Budget, Category, MemoryTimeline, Profile, Samples, StepBudget
from steplab.trace.analysis import Analysis, Window
from steplab.trace.budget import time_budget
from steplab.tune.ceilings import ceiling, op_times, phase_times, serves
from tests.compare.sides import run_of
from tests.report.analyses import analysis_of
from tests.trace.traces import call, launched, range_, trace_of
from tests.trace.works import syncs_on, work_on


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


def test_whoever_else_used_the_cores_changes_no_share():
    """Timed steps of an LSTM on a busy machine: the optimizer takes 0.43 of a quiet 2.51 ms."""
    run = profiled(wall=5.0, on_device=False, launch=1.0)
    (quiet,) = run.profile.budget.steps
    held_up = (Category("matmul bf16", 4.0, 8), Category("elementwise", 90.0, 30))
    busy = replace(quiet, wall_ms=95.0, categories=held_up)
    budget = replace(run.profile.budget, steps=(busy, quiet, busy))
    run = replace(run, profile=replace(run.profile, budget=budget))
    step = Samples((2.55, 10.55, 2.51, 7.81, 6.54), "ms")
    phases = {"optimizer": Samples((0.44, 0.43, 0.43, 0.43, 0.42), "ms")}
    run = replace(run, clock=replace(run.clock, step=step, phases=phases))
    found = ceiling({"phase:optimizer": 1.0}, run, {}, "time")
    assert found.share == pytest.approx(0.43 / 2.51)
    assert ceiling({"kind:matmul": 1.0}, run, {}, "time").share == pytest.approx(4.0 / 5.0)
    assert ceiling({"term:launch": 1.0}, run, {}, "time").share == pytest.approx(1.0 / 5.0)
    analysis = analysis_of(device=False)
    times = op_times(run, analysis, {"attention": ("blocks.0.attention", "blocks.1.attention")})
    assert times["op:attention"] / 6.54 == pytest.approx(0.3), "of a window of 10 ms, 3"


def test_nobody_beats_the_roofline():
    """Of 4 ms in products 3 have a model, and its ideal is 1 ms."""
    run = profiled()
    assert ceiling({"lost:matmul": 1.0}, run, {}, "time") is None
    step = run.profile.budget.typical
    known = (Category("matmul bf16", 4.0, 8, ideal_ms=1.0, modeled_ms=3.0), *step.categories[1:])
    budget = Budget((replace(step, categories=known),), on_device=True)
    run = replace(run, profile=replace(run.profile, budget=budget))
    assert ceiling({"lost:matmul": 1.0}, run, {}, "time").value == pytest.approx(2.0)


def test_no_more_than_the_whole_step_can_be_gained():
    run = replace(profiled(), clock=replace(profiled().clock, step=Samples((3.0,) * 6, "ms")))
    assert ceiling({"kind:matmul": 1.0}, run, {}, "time").share == 1.0


def test_memory_is_looked_up_where_it_is_wanted():
    kinds = {"weights": 30, "activations": 70}
    timeline = MemoryTimeline((0.0,), {}, {}, 100, 0.0, kinds, (), ())
    savings = {"memory:activations": 0.5, "kind:matmul": 1.0}
    found = ceiling(savings, profiled(memory=timeline), {}, "memory")
    assert found.value == 35 and found.share == pytest.approx(0.35)
    assert serves(savings, "time") and serves(savings, "memory") and serves({}, "memory")
    assert not serves({"kind:matmul": 1.0}, "memory")
    assert not serves({"memory:activations": 1.0}, "time")


def test_the_time_of_an_op_is_that_of_its_modules():
    """Two of the four kernels of a step belong to blocks.*.attention: 2 ms and 1 ms."""
    run = run_of((10.0,) * 8)
    paths = {"attention": ("blocks.0.attention", "blocks.1.attention"), "loss": ("loss",)}
    assert op_times(run, analysis_of(), paths)["op:attention"] == pytest.approx(3.0)
    half = op_times(run_of((5.0,) * 8), analysis_of(device=False), paths)
    assert half == {"op:attention": pytest.approx(1.5)}


def starving(profiled_ms=10.0):
    """A step in which 3 and 2.5 ms were waited for experts, 1.5 ms of it in a synchronization.

    Kernels of 0.5 ms at 3, 6 and 9 ms, launched at 2.5, 5.5 and 9 ms.
    """
    ms = 1_000_000
    events = [range_("ProfilerStep#0", 0, int(profiled_ms * ms)), range_("forward", 0, 10 * ms)]
    for number, (returned, start) in enumerate(((2.5, 3.0), (5.5, 6.0), (9.0, 9.0)), 1):
        back = int(returned * ms)
        events += launched("mm", back - 10, back, int(start * ms), ms // 2, number)
    events.append(call("cudaStreamSynchronize", int(3.5 * ms), int(1.5 * ms)))
    trace = trace_of(events)
    windows, work, syncs = (Window(0, 0, int(profiled_ms * ms)),), work_on(trace), syncs_on(trace)
    labels = (*work.labels, "blocks.0.experts", "blocks.1.experts.first", "backward")
    experts, first = len(work.labels), len(work.labels) + 1
    work = replace(
        work,
        labels=labels,
        module=np.array([experts, first, 0], np.int32),
        phase=np.full(3, len(labels) - 1, np.int32),
    )
    budget = time_budget(trace, windows, work, syncs)
    analysis = Analysis(trace, None, windows, work, syncs, budget)
    run = run_of((10.0,) * 8)
    return replace(run, profile=Profile((0, 1, 1, 1), ("t",), budget=budget)), analysis


EXPERTS = {"experts": ("blocks.0.experts", "blocks.1.experts"), "loss": ("loss",)}


def test_the_wait_for_its_kernels_is_the_ops_too():
    """Another implementation may need fewer launches and no synchronization."""
    run, analysis = starving()
    known = op_times(run, analysis, EXPERTS)
    assert known == {"op:experts": pytest.approx(1.0), "idle:experts": pytest.approx(5.5)}
    found = ceiling({"op:experts": 1.0}, run, known, "time")
    assert found.value == pytest.approx(6.5)
    assert found.parts == "waiting for these 5.500 ms, experts 1.000 ms"
    assert phase_times(run, analysis) == {"phase:backward": pytest.approx(1.5 + 8.0)}


def test_what_the_profiler_added_is_no_wait_for_an_op():
    """Of 12.5 ms the profiler added 2.5 ms: taken from the 6 ms of waiting for launches."""
    run, analysis = starving(profiled_ms=12.5)
    terms = analysis.budget.typical.terms
    waits = {name: terms[name] for name in ("launch", "synchronization", "dispatch")}
    assert waits == {
        "launch": pytest.approx(6.0), "synchronization": pytest.approx(1.5),
        "dispatch": pytest.approx(1.0),
    }  # fmt: skip
    share = 1 - 2.5 / 6.0
    idle = op_times(run, analysis, EXPERTS)["idle:experts"]
    assert idle == pytest.approx(1.5 + 1.0 + share * 3.0)


def test_no_wait_is_counted_twice_nor_longer_than_the_device_still_waits():
    run = profiled(launch=2.0, dispatch=0.5, synchronization=0.5)
    known = {"op:experts": 1.0, "idle:experts": 2.5, "op:router": 0.5, "idle:router": 1.0}
    both = {"op:experts": 1.0, "op:router": 1.0}
    assert ceiling({"op:experts": 1.0}, run, known, "time").value == pytest.approx(3.5)
    assert ceiling(both, run, known, "time").value == pytest.approx(1.5 + 3.0)
    graph = {"term:launch": 1.0, "term:dispatch": 1.0}
    assert ceiling({**both, **graph}, run, known, "time").value == pytest.approx(1.5 + 3.0)
    replayed = profiled(dispatch=0.1)
    assert ceiling(both, replayed, known, "time").value == pytest.approx(1.5 + 0.1)
