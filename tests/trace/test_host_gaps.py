"""What the host takes before each operator is that operator's, where there is no device."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from steplab.trace.analyze import analyze
from steplab.trace.host_gaps import time_with_gaps
from steplab.trace.silences import computes
from tests.trace.traces import op, python, range_, trace_of

US = 1000
NODE = "autograd::engine::evaluate_function: MmBackward0"


def times(events):
    """The microseconds of each operator with its gap, in the order of the trace."""
    one = analyze(trace_of(events))
    found = time_with_gaps(one.trace, one.windows, one.work, one.syncs, one.silences)
    return [
        (one.trace.text(name), ns / US)
        for name, ns in zip(one.trace.ops.name.tolist(), found.tolist(), strict=True)
    ]


def us(name, start, length):
    return op(name, start * US, length * US)


def test_gaps_views_and_nodes_of_autograd_lead_to_the_operator_behind_them():
    events = [
        range_("ProfilerStep#1", 0, 90 * US),
        us("aten::mm", 10, 10),
        us("aten::view", 22, 1),
        us("aten::linear", 25, 20),
        us("aten::addmm", 27, 16),
        us(NODE, 50, 30),
        us("MmBackward0", 52, 26),
        us("aten::mm", 55, 20),
    ]
    assert times(events) == [
        ("aten::mm", 20),  # from the beginning of the step
        ("aten::view", 0),
        ("aten::linear", 5),  # 4 of its own, and a fifth of the 5 before it
        ("aten::addmm", 20),
        (NODE, 0),
        ("MmBackward0", 0),
        ("aten::mm", 30),  # from the end of linear, the 15 after it are nobody's
    ]


def test_silences_batches_and_steps_before_are_no_part_of_a_gap():
    events = [
        range_("ProfilerStep#1", 0, 50 * US),
        us("aten::mm", 0, 40),
        range_("ProfilerStep#2", 50 * US, 500 * US),
        us("aten::mm", 60, 40),  # 10 after the border
        range_("data", 110 * US, 30 * US),
        us("aten::mm", 150, 40),  # 20 without the batch
        python("train.py(7): count", 190 * US, 300 * US),
        us("aten::mm", 490, 40),  # behind a silence
    ]
    assert [time for _, time in times(events)] == [40, 50, 60, 40]


def test_threads_beside_the_one_that_runs_the_step_have_no_gaps():
    events = [
        range_("ProfilerStep#1", 0, 100 * US),
        us("aten::mm", 5, 10),
        us("aten::add", 20, 10),
        op("aten::stack", 60 * US, 10 * US, 7),
    ]
    assert dict(times(events)) == {"aten::mm": 15, "aten::add": 15, "aten::stack": 10}


def test_a_compiled_backward_works_itself():
    events = [
        range_("ProfilerStep#1", 0, 60 * US),
        us("aten::mm", 0, 20),
        us("CompiledFunctionBackward", 30, 20),
    ]
    assert dict(times(events)) == {"aten::mm": 20, "CompiledFunctionBackward": 30}


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), min_size=1, max_size=20))
def test_all_times_together_are_the_step_up_to_its_last_operator(pauses_and_lengths):
    events, at = [], 0
    for pause, length in pauses_and_lengths:  # all pauses are too short for a silence
        events.append(us("aten::mm", at + pause, length))
        at += pause + length
    found = times([range_("ProfilerStep#1", 0, (at + 9) * US), *events])
    assert np.isclose(sum(time for _, time in found), at)


def test_only_views_and_what_makes_tensors_compute_nothing():
    idle = ("aten::t", "aten::to", "aten::view_as_real", "aten::empty_like", "aten::item")
    working = ("aten::tanh", "aten::topk", "aten::tril", "aten::take", "aten::mm", "aten::sort")
    assert not any(computes(name) for name in idle)
    assert all(computes(name) for name in working)
