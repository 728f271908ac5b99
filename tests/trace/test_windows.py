"""Step windows of a trace, and a first step that is cut."""

import numpy as np

from steplab.findings import Case, explain
from steplab.trace.analysis import Window
from steplab.trace.analyze import analyze
from steplab.trace.windows import step_at, step_windows
from tests.trace.traces import AUTOGRAD, call, complete, kernel, launched, op, range_, trace_of


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


def step_ranges(count: int):
    return [range_(f"ProfilerStep#{n}", 1000 * n, 1000) for n in range(1, count + 1)]


def issued(number: int, start: int, duration: int):
    """A kernel that step `number` launches."""
    called = 1000 * number + 20
    return launched("gemm", called, called + 5, start, duration, correlation=number)


def test_steps_of_a_host_that_is_ahead_are_told_by_the_device():
    """Marks of 1 us hold what earlier steps launched; the device takes 3 us for each step."""
    events = [*step_ranges(3), kernel("gemm", 1100, 2000, correlation=9)]
    for number in (1, 2, 3):
        events += issued(number, 100 + 3000 * number, 2900)
    analysis = analyze(trace_of(events))
    assert analysis.windows == (Window(2, 6000, 9000), Window(3, 9000, 12000))
    assert [step.wall_ms for step in analysis.budget.steps] == [0.003, 0.003]
    assert "the host is a step or more ahead" in " ".join(analysis.budget.notes)
    assert analysis.work.step.tolist() == [-1, -1, 2, 3]


def test_a_step_that_shows_the_work_of_an_unseen_one_is_left_out():
    """The host is a step ahead: step 1 shows step 0's kernel, and only from its middle on."""
    events = [*step_ranges(3), kernel("gemm", 1400, 500, correlation=9)]
    for number in (1, 2):
        events += issued(number, 1000 * (number + 1) + 10, 980)
    budget = analyze(trace_of(events)).budget
    assert [step.number for step in budget.steps] == [2, 3]
    assert any("the first step is left out" in note for note in budget.notes)
    assert all(step.terms["kernels"] > 0.97 * step.wall_ms for step in budget.steps)


def test_a_little_of_the_step_before_does_not_matter():
    events = [*step_ranges(2), kernel("gemm", 1000, 10, correlation=9)]
    for number in (1, 2):
        events += issued(number, 1000 * number + 40, 900)
    assert [step.number for step in analyze(trace_of(events)).budget.steps] == [1, 2]


def test_an_only_step_stays_and_is_told():
    events = [*step_ranges(1), kernel("gemm", 1100, 800, correlation=9), *issued(1, 2010, 980)]
    budget = analyze(trace_of(events)).budget
    assert len(budget.steps) == 1 and any("the only step is cut" in note for note in budget.notes)


def test_a_step_whose_own_work_comes_after_the_recording_is_told():
    """All that it shows was launched before; what its host launches is no silence."""
    events = [range_("ProfilerStep#1", 0, 16_000_000), kernel("gemm", 0, 14_000_000, 9)]
    events += [call("cudaLaunchKernel", 50_000 * number, 5_000, number) for number in (1, 2)]
    case = Case(analysis=analyze(trace_of(events)))
    assert any("the only step is cut" in note for note in case.analysis.budget.notes)
    assert explain(case) == ()


def test_a_trace_without_launches_and_a_single_step_are_kept():
    alone = [*step_ranges(2), kernel("gemm", 1100, 500), kernel("gemm", 2100, 500)]
    assert len(analyze(trace_of(alone)).budget.steps) == 2
    assert len(analyze(trace_of([*step_ranges(1), kernel("gemm", 1100, 500)])).budget.steps) == 1
    empty = [*step_ranges(2), kernel("gemm", 1100, 500)]
    assert len(analyze(trace_of(empty)).budget.steps) == 2


def test_several_steps_that_show_the_work_of_unseen_ones_are_left_out():
    events = [*step_ranges(4), kernel("gemm", 1100, 800), kernel("gemm", 2100, 800)]
    for number in (1, 2):
        events += issued(number, 1000 * (number + 2) + 10, 980)
    budget = analyze(trace_of(events)).budget
    assert [step.number for step in budget.steps] == [3, 4]
    assert any("the first 2 steps are left out" in note for note in budget.notes)


def test_an_empty_step_is_never_the_median():
    """Steps that the host only passed through, as a profiler's callback leaves them."""
    marks = [range_(f"ProfilerStep#{n}", 1000 * n, 5) for n in (1, 2)]
    events = [*marks, range_("ProfilerStep#3", 3000, 900), *issued(3, 3100, 700)]
    budget = analyze(trace_of(events)).budget
    assert len(budget.steps) == 3 and budget.typical.number == 3


def test_without_marks_a_step_lies_between_two_updates():
    update = "Optimizer.step#AdamW.step"
    events = [op("aten::mm", start, 900) for start in range(0, 4000, 1000)]
    events += [range_(update, start + 900, 50) for start in range(0, 4000, 1000)]
    budget = analyze(trace_of(events)).budget
    assert [step.wall_ms for step in budget.steps] == [0.001] * 3 and budget.marked
    alone = analyze(trace_of(events[:4])).budget
    assert len(alone.steps) == 1 and not alone.marked
