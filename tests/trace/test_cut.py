"""A first step with the work of one that was launched before the recording began."""

from steplab.trace.analyze import analyze
from tests.trace.traces import kernel, launched, range_, trace_of


def steps(count: int):
    return [range_(f"ProfilerStep#{n}", 1000 * n, 1000) for n in range(1, count + 1)]


def issued(number: int, start: int, duration: int):
    """A kernel that step `number` launches."""
    called = 1000 * number + 20
    return launched("gemm", called, called + 5, start, duration, correlation=number)


def test_a_step_that_shows_the_work_of_an_unseen_one_is_left_out():
    """The host is a step ahead: step 1 shows step 0's kernel, and only from its middle on."""
    events = [*steps(3), kernel("gemm", 1400, 500, correlation=9)]
    for number in (1, 2):
        events += issued(number, 1000 * (number + 1) + 10, 980)
    budget = analyze(trace_of(events)).budget
    assert [step.number for step in budget.steps] == [2, 3]
    assert any("the first step is left out" in note for note in budget.notes)
    assert all(step.terms["kernels"] > 0.97 * step.wall_ms for step in budget.steps)


def test_a_little_of_the_step_before_does_not_matter():
    events = [*steps(2), kernel("gemm", 1000, 10, correlation=9)]
    for number in (1, 2):
        events += issued(number, 1000 * number + 40, 900)
    assert [step.number for step in analyze(trace_of(events)).budget.steps] == [1, 2]


def test_an_only_step_stays_and_is_told():
    events = [*steps(1), kernel("gemm", 1100, 800, correlation=9), *issued(1, 2010, 980)]
    budget = analyze(trace_of(events)).budget
    assert len(budget.steps) == 1 and any("the only step is cut" in note for note in budget.notes)


def test_a_trace_without_launches_and_a_single_step_are_kept():
    alone = [*steps(2), kernel("gemm", 1100, 500), kernel("gemm", 2100, 500)]
    assert len(analyze(trace_of(alone)).budget.steps) == 2
    assert len(analyze(trace_of([*steps(1), kernel("gemm", 1100, 500)])).budget.steps) == 1
    empty = [*steps(2), kernel("gemm", 1100, 500)]
    assert len(analyze(trace_of(empty)).budget.steps) == 2
