from dataclasses import replace

import numpy as np
import pytest

from steplab.record.budget import TERMS
from steplab.trace.analysis import Window
from steplab.trace.gaps import gaps_of, pace_of
from tests.trace.traces import call, kernel, launched, op, range_, trace_of
from tests.trace.works import LABELS, syncs_on, work_on

US = 1_000
# Kernel, sync of 30 us, launch at 50 us; a short gap of 5 us; the host leaves at 120 us.
EVENTS = [
    *launched("mm", 1 * US, 2 * US, 5 * US, 10 * US, correlation=1),
    call("cudaStreamSynchronize", 6 * US, 39 * US),
    *launched("add", 48 * US, 50 * US, 50 * US, 20 * US, correlation=2),
    *launched("mm", 60 * US, 62 * US, 75 * US, 5 * US, correlation=3),
    op("aten::item", 5 * US, 45 * US),
]
WINDOWS = (Window(7, 0, 60 * US), Window(8, 60 * US, 120 * US))


def gaps_and_pace():
    trace = trace_of(EVENTS)
    work, syncs = work_on(trace), syncs_on(trace)
    work = replace(work, op=np.array([1, 2, 3], np.int32), line=np.array([4, 5, 6], np.int32))
    syncs = replace(syncs, op=np.array([3], np.int32), line=np.array([2], np.int32))
    gaps = gaps_of(trace, WINDOWS, work, syncs)
    return gaps, pace_of(trace, WINDOWS, gaps, syncs)


def test_every_gap_has_a_cause_and_somebody_who_was_at_it():
    gaps, _ = gaps_and_pace()
    rows = zip(gaps.step, gaps.start // US, gaps.duration // US, strict=True)
    assert [tuple(map(int, row)) for row in rows] == [
        (7, 0, 5),
        (7, 15, 35),
        (8, 70, 5),
        (8, 80, 40),
    ]
    causes = [TERMS[code] if code >= 0 else None for code in gaps.cause]
    assert causes == ["dispatch", "synchronisation", "dispatch", None]
    assert gaps.row.tolist() == [0, 1, 2, -1]
    # The second gap is the sync's, by its own op and line; the last one is nobody's.
    assert [LABELS[code] for code in gaps.op] == [LABELS[1], LABELS[3], LABELS[3], LABELS[0]]
    assert gaps.line.tolist() == [4, 2, 6, 0]


def test_gaps_sum_to_the_idle_time():
    gaps, pace = gaps_and_pace()
    assert sum(step.idle_ms for step in pace) == pytest.approx(gaps.duration.sum() / 1e6)


def test_pace_of_the_host():
    _, (first, second) = gaps_and_pace()
    assert (first.launches, first.activities, first.gaps) == (2, 2, 2)
    assert (second.launches, second.activities, second.gaps) == (1, 1, 2)
    assert first.short_gaps == second.short_gaps == pytest.approx(0.5)
    # aten::item from 5 to 50 us but for its wait of 39 us, and the launch call before it.
    assert first.host_busy == pytest.approx((1 + 6) / 60)
    assert second.host_busy == pytest.approx(2 / 60)


def test_a_busy_device_has_no_gaps():
    trace = trace_of([kernel("mm", 0, 10), range_("forward", 0, 10)])
    work, syncs = work_on(trace), syncs_on(trace)
    window = (Window(0, 0, 10),)
    gaps = gaps_of(trace, window, work, syncs)
    (pace,) = pace_of(trace, window, gaps, syncs)
    assert len(gaps) == pace.gaps == 0 and pace.idle_ms == 0 and np.isnan(pace.short_gaps)


def test_a_replayed_graph_is_one_launch():
    events = [call("cudaGraphLaunch", 0, 5, 9), *(kernel("mm", t, 10, 9) for t in (10, 25))]
    trace = trace_of(events)
    work, syncs = work_on(trace), syncs_on(trace)
    window = (Window(0, 0, 40),)
    (pace,) = pace_of(trace, window, gaps_of(trace, window, work, syncs), syncs)
    assert (pace.launches, pace.activities) == (1, 2)


def test_without_a_device_there_are_no_gaps():
    trace = trace_of([op("mm", 0, 10)])
    work, syncs = work_on(trace), syncs_on(trace)
    window = (Window(0, 0, 20),)
    gaps = gaps_of(trace, window, work, syncs)
    (pace,) = pace_of(trace, window, gaps, syncs)
    assert len(gaps) == pace.launches == 0 and pace.host_busy == pytest.approx(0.5)
