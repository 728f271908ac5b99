"""The budget against a second implementation that looks at every nanosecond, and by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steplab.core.budget import TERMS
from steplab.trace.analysis import Syncs, Window, WorkTable
from steplab.trace.budget import IDLE_TERMS, idle_before, time_budget
from steplab.trace.events import KERNEL, Trace
from steplab.trace.windows import drop_cut_steps
from tests.trace.traces import call, copy, fill, kernel, launched, op, python, range_, trace_of
from tests.trace.works import LABELS, syncs_on, work_on


def steps_of(trace: Trace, *windows: Window, ideal: float = float("nan")):
    budget = time_budget(trace, windows, work_on(trace, ideal), syncs_on(trace))
    return budget.steps


def in_ns(step) -> dict[str, int]:
    """Terms and residual that are not 0, in whole ns: more exact than a float of ms."""
    parts = {**step.terms, "residual": step.residual_ms}
    return {name: round(ms * 1e6) for name, ms in parts.items() if round(ms * 1e6)}


def one_step(events, end: int, **options) -> dict[str, int]:
    (step,) = steps_of(trace_of(events), Window(0, 0, end), **options)
    return in_ns(step)


# Every instant, one by one.


def covers(spans, t: int) -> bool:
    return bool(np.any((spans.start <= t) & (t < spans.end)))


def term_at(trace: Trace, work: WorkTable, syncs: Syncs, t: int) -> str:
    device = trace.device
    running = (device.start <= t) & (t < device.end)
    talks = work.category == LABELS.index("communication")
    for term, rows in (
        ("kernels", (device.kind == KERNEL) & ~talks),
        ("communication", (device.kind == KERNEL) & talks),
        ("copies", device.kind != KERNEL),
    ):
        if np.any(running & rows):
            return term
    data = any(
        trace.text(trace.ranges.name[i]) == "data" and s <= t < trace.ranges.end[i]
        for i, s in enumerate(trace.ranges.start)
    )
    sync = bool(np.any((syncs.start <= t) & (t < syncs.start + syncs.duration)))
    host = any(covers(spans, t) for spans in (trace.ops, trace.calls, trace.ranges, trace.python))
    coming = np.flatnonzero(device.start > t)
    if len(coming) and work.launched[coming[0]] >= 0:
        k = coming[0]
        if k and device.correlation[k] == device.correlation[k - 1]:
            return "dispatch"
        if t >= work.launched[k]:
            return "dispatch"
        host = True
    return "data wait" if data else "synchronization" if sync else "launch" if host else "residual"


TIME, LENGTH = st.integers(0, 60), st.integers(1, 12)
SPAN = st.tuples(TIME, LENGTH)


@st.composite
def timelines(draw):
    """Work on two streams, launched, launched twice or from before the trace; and a host."""
    events = []
    for start, length in draw(st.lists(SPAN, max_size=7)):
        make = draw(st.sampled_from(["mm", "add", "nccl", "copy", "fill"]))
        correlation = draw(st.integers(0, 5))
        stream = draw(st.integers(7, 8))
        if make == "copy":
            events.append(copy("Memcpy HtoD", start, length, correlation, 8, stream))
        elif make == "fill":
            events.append(fill(start, length, correlation, 8, stream))
        else:
            events.append(kernel(make, start, length, correlation, stream))
    if not events:
        events.append(kernel("mm", *draw(SPAN)))
    for correlation in draw(st.sets(st.integers(1, 5), max_size=4)):
        events.append(call("cudaLaunchKernel", *draw(SPAN), correlation))
    for start, length in draw(st.lists(SPAN, max_size=2)):
        events.append(call("cudaStreamSynchronize", start, length))
    for start, length in draw(st.lists(SPAN, max_size=2)):
        events.append(range_("data", start, length))
    for start, length in draw(st.lists(SPAN, max_size=2)):
        events.append(op("aten::mm", start, length))
    return trace_of(events)


@settings(max_examples=150, deadline=None)
@given(timelines(), st.integers(0, 40), st.integers(1, 50))
def test_every_instant_is_counted_once_and_by_priority(trace, low, length):
    high = low + length
    work, syncs = work_on(trace), syncs_on(trace)
    windows = (Window(0, low, high), Window(1, high, high + 20))
    budget = time_budget(trace, windows, work, syncs)
    for window, step in zip(drop_cut_steps(windows, work, trace)[0], budget.steps, strict=True):
        every = [term_at(trace, work, syncs, t) for t in range(window.start, window.end)]
        assert in_ns(step) == {name: every.count(name) for name in set(every)}
        assert all(ms >= 0 for ms in step.terms.values()) and tuple(step.terms) == TERMS
        assert round(step.wall_ms * 1e6) == sum(in_ns(step).values())
        categories = sum(category.ms for category in step.categories)
        assert categories == pytest.approx(step.terms["kernels"], abs=1e-12)


@settings(max_examples=150, deadline=None)
@given(timelines(), st.integers(0, 40), st.integers(1, 50))
def test_idle_time_belongs_to_the_work_that_ends_it_and_sums_to_the_terms(trace, low, length):
    work, syncs, window = work_on(trace), syncs_on(trace), Window(0, low, low + length)
    (step,) = time_budget(trace, (window,), work, syncs).steps
    idle = idle_before(trace, (window,), work, syncs, (window,))
    assert {name: ns.sum() for name, ns in idle.items()} == {
        name: pytest.approx(step.terms[name] * 1e6, abs=1e-6) for name in IDLE_TERMS
    }
    expected = {name: np.zeros(len(work) + 1) for name in IDLE_TERMS}
    for t in range(window.start, window.end):
        term = term_at(trace, work, syncs, t)
        if term in expected:
            coming = np.flatnonzero(trace.device.start > t)
            expected[term][coming[0] if len(coming) else -1] += 1
    for name, ns in expected.items():
        assert ns.tolist() == idle[name].tolist()


@st.composite
def host_timelines(draw):
    events = [range_("ProfilerStep#1", 0, 80)]
    for start, length in draw(st.lists(SPAN, max_size=5)):
        events.append(op(draw(st.sampled_from(["mm", "add"])), start, length, draw(TIME)))
    for make, name in ((range_, "data"), (range_, "forward"), (python, "train.py(3): f")):
        for start, length in draw(st.lists(SPAN, max_size=2)):
            events.append(make(name, start, length))
    return trace_of(events)


@settings(max_examples=80, deadline=None)
@given(host_timelines())
def test_without_a_device(trace):
    (step,) = steps_of(trace, Window(1, 0, 80))
    names = [trace.text(name) for name in trace.ranges.name]
    ranges = list(zip(names, trace.ranges.start, trace.ranges.end, strict=True))

    def term(t: int) -> str:
        around = {name for name, start, end in ranges if start <= t < end}
        if covers(trace.ops, t):
            return "kernels"
        if "data" in around:
            return "data wait"
        return "launch" if "forward" in around or covers(trace.python, t) else "residual"

    every = [term(t) for t in range(80)]
    assert in_ns(step) == {name: every.count(name) for name in set(every)}
    total = sum(category.ms for category in step.categories)
    assert total == pytest.approx(step.terms["kernels"], abs=1e-12)


# Each term by hand.

GAP = [kernel("mm", 0, 10), *launched("mm", 50, 60, 80, 20)]


def test_before_the_launch_returned_the_host_was_late_after_it_the_device():
    assert one_step(GAP, 100) == {"kernels": 30, "launch": 50, "dispatch": 20}


def test_fetching_a_batch_explains_a_late_launch():
    events = [*GAP, range_("data", 5, 25), range_("forward", 30, 60)]
    assert one_step(events, 100) == {"kernels": 30, "data wait": 20, "launch": 30, "dispatch": 20}


def test_a_foreign_data_loader_is_data_too():
    name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    assert one_step([*GAP, range_(name, 0, 30)], 100)["data wait"] == 20


def test_a_thread_that_fetches_ahead_delays_nobody():
    events = [*GAP, range_("ProfilerStep#0", 0, 100), range_("data", 0, 100, thread=300)]
    assert "data wait" not in one_step(events, 100)


def test_waiting_for_the_device_counts_until_the_call_returns():
    events = [*GAP, call("cudaDeviceSynchronize", 2, 18)]
    found = one_step(events, 100)
    assert found == {"kernels": 30, "synchronization": 10, "launch": 40, "dispatch": 20}


def test_waiting_for_work_that_was_launched_is_dispatch():
    events = [*GAP, call("cudaDeviceSynchronize", 62, 40)]
    assert one_step(events, 100) == {"kernels": 30, "launch": 50, "dispatch": 20}


def test_communication_counts_where_nothing_is_computed():
    events = [kernel("mm", 10, 20), kernel("nccl", 0, 50, stream=9), copy("Memcpy", 40, 20)]
    assert one_step(events, 60) == {"kernels": 20, "communication": 30, "copies": 10}


def test_copies_and_fills_count_where_no_kernel_runs():
    events = [kernel("mm", 0, 20), copy("Memcpy HtoD", 10, 20, stream=8), fill(30, 5)]
    assert one_step(events, 35) == {"kernels": 20, "copies": 15}


def test_after_the_last_work_the_host_tells():
    events = [kernel("mm", 0, 10), call("cudaDeviceSynchronize", 0, 15), range_("data", 15, 10)]
    events += [range_("optimizer", 25, 15), range_("ProfilerStep#0", 0, 50)]
    found = one_step(events, 50)
    assert found == {
        "kernels": 10, "synchronization": 5, "data wait": 10, "launch": 15, "residual": 10,
    }  # fmt: skip


def test_a_gap_over_the_border_of_steps_belongs_to_both():
    events = [*launched("mm", 0, 0, 0, 10, correlation=2), *GAP[1:]]
    first, second = steps_of(trace_of(events), Window(3, 0, 55), Window(4, 55, 100))
    assert in_ns(first) == {"kernels": 10, "launch": 45}
    assert in_ns(second) == {"kernels": 20, "launch": 5, "dispatch": 20}
    assert (first.number, second.number) == (3, 4)


def test_a_replayed_graph_waits_for_its_launch_once():
    events = [call("cudaGraphLaunch", 0, 50, 9), *(kernel("mm", t, 10, 9) for t in (20, 35, 60))]
    assert one_step(events, 70) == {"kernels": 30, "launch": 20, "dispatch": 20}


def test_a_device_alone_leaves_its_gaps_unexplained():
    events = [kernel("mm", 0, 10), kernel("mm", 15, 5)]
    assert one_step(events, 20) == {"kernels": 15, "residual": 5}


# Categories and the ideal.


def test_where_kernels_overlap_the_one_that_started_first_counts():
    events = [kernel("mm", 0, 10), kernel("add", 4, 10, stream=8), kernel("add", 5, 2, stream=9)]
    (step,) = steps_of(trace_of(events), Window(0, 0, 20), ideal=1.0)
    mm, add = step.categories
    assert (mm.name, mm.ms * 1e6, mm.launches) == ("matmul bf16", pytest.approx(10), 1)
    assert (add.name, add.ms * 1e6, add.launches) == ("elementwise", pytest.approx(4), 2)
    assert add.ideal_ms * 1e6 == pytest.approx(2)  # hidden work is work too


def test_a_kernel_on_a_border_is_shared_with_its_ideal():
    trace = trace_of([kernel("mm", 0, 10)])
    first, second = steps_of(trace, Window(0, 0, 4), Window(1, 4, 10), ideal=5.0)
    assert first.categories[0].ideal_ms * 1e6 == pytest.approx(2)
    assert second.categories[0].ideal_ms * 1e6 == pytest.approx(3)
    assert second.categories[0].launches == 0


def test_an_ideal_is_never_longer_than_the_kernel():
    (step,) = steps_of(trace_of([kernel("mm", 0, 10)]), Window(0, 0, 10), ideal=30.0)
    assert step.categories[0].lost_ms == pytest.approx(0)


def test_only_modeled_kernels_have_an_ideal():
    trace = trace_of([kernel("mm", 0, 10), kernel("mm", 10, 30), kernel("add", 40, 10)])
    work = replace(work_on(trace), ideal=np.array([4.0, np.nan, np.nan]))
    budget = time_budget(trace, (Window(0, 0, 50),), work, syncs_on(trace))
    mm, add = budget.steps[0].categories
    assert (mm.ideal_ms * 1e6, mm.modeled_ms * 1e6) == (pytest.approx(4), pytest.approx(10))
    assert mm.lost_ms * 1e6 == pytest.approx(6)
    assert add.ideal_ms is None and add.modeled_ms == 0


def test_operators_of_two_threads_share_the_time_they_overlap():
    trace = trace_of([op("mm", 0, 10), op("add", 0, 10, thread=200)])
    (step,) = steps_of(trace, Window(0, 0, 10))
    assert {c.name: c.ms * 1e6 for c in step.categories} == {
        "matmul bf16": pytest.approx(5), "elementwise": pytest.approx(5),
    }  # fmt: skip


def test_peaks_and_notes_say_what_the_ideal_rests_on():
    events, window = [kernel("mm", 0, 10)], (Window(0, 0, 10),)
    card = {"deviceProperties": [{"id": 0, "name": "NVIDIA H200"}]}
    trace = trace_of(events, properties=card)
    work = replace(work_on(trace), matmul_dtype=np.array([LABELS.index("bf16")], np.int32))
    budget = time_budget(trace, window, work, syncs_on(trace))
    assert budget.on_device and set(budget.peaks) == {"memory", "bf16"}
    assert "989.4 TFLOP/s" in budget.peaks["bf16"] and "4800 GB/s" in budget.peaks["memory"]
    named = time_budget(trace_of(events), window, work, syncs_on(trace), "NVIDIA Q1")
    assert not named.peaks and any("NVIDIA Q1 is not in the catalog" in n for n in named.notes)
    nameless = time_budget(trace_of(events), window, work, syncs_on(trace))
    assert any("does not name its device" in note for note in nameless.notes)
    host = trace_of([op("mm", 0, 10)])
    assert not time_budget(host, window, work_on(host), syncs_on(host)).on_device
