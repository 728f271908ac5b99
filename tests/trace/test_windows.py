import numpy as np

from steplab.trace.analysis import Window
from steplab.trace.windows import step_at, step_windows

from .traces import AUTOGRAD, complete, op, range_, trace_of


def test_steps_come_from_their_ranges_in_order():
    trace = trace_of([range_("ProfilerStep#3", 0, 100), range_("ProfilerStep#4", 110, 90)])
    assert step_windows(trace) == (Window(3, 0, 100), Window(4, 110, 200))


def test_a_trace_without_steps_is_one_window():
    trace = trace_of([op("aten::mm", 50, 30), range_("ProfilerStep", 60, 100)])
    assert step_windows(trace) == (Window(0, 50, 160),)


def test_the_longest_of_several_marks_of_a_step_counts():
    events = [
        range_("ProfilerStep#1", 0, 100),
        range_("ProfilerStep#1", 1, 80, AUTOGRAD),
        range_("ProfilerStep#2", 105, 40, AUTOGRAD),
        range_("ProfilerStep#2", 110, 90),
    ]
    assert step_windows(trace_of(events)) == (Window(1, 0, 100), Window(2, 110, 200))


def test_repeated_numbers_are_counted_anew():
    marks = [range_(f"ProfilerStep#{i % 2}", 100 * i, 90) for i in range(4)]
    assert [w.number for w in step_windows(trace_of(marks))] == [0, 1, 2, 3]


def test_old_traces_have_steps_among_the_operators():
    trace = trace_of([complete("Operator", "ProfilerStep#7", 10, 20)])
    assert step_windows(trace) == (Window(7, 10, 30),)


def test_an_instant_belongs_to_its_step_or_to_none():
    windows = (Window(3, 0, 100), Window(4, 110, 200))
    asked = np.array([-1, 0, 99, 100, 105, 110, 200, 201])
    assert step_at(windows, asked).tolist() == [-1, 3, 3, 3, -1, 4, 4, -1]
