"""Effort in proportion to the events: calls and memory are counted, and every pass that looks at
all steps at once is compared with one that looks at them one by one.
"""

from __future__ import annotations

import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steplab.core import Finding
from steplab.findings.case import Case
from steplab.findings.rank import explain
from steplab.findings.rows import Rows
from steplab.report.charts.timeline import MAX_BOXES, step_lanes, thin, typical_window
from steplab.report.pages import write_explain_page
from steplab.trace.analysis import Analysis, Window, WorkTable
from steplab.trace.analyze import analyze
from steplab.trace.attribution import forward_ops
from steplab.trace.category_sums import kernel_categories
from steplab.trace.events import Ops
from tests.trace import traces
from tests.trace.traces import trace_of
from tests.trace.works import LABELS

H200 = {"deviceProperties": [{"id": 0, "name": "NVIDIA H200"}]}


def many_steps(count: int, own_names: bool = False) -> list[traces.Event]:
    """Steps of one forward, one product and its kernel, each kernel of another name if wanted."""
    events: list[traces.Event] = []
    for step in range(count):
        at, name = step * 100_000, f"gemm_{step}" if own_names else "gemm"
        events += [
            traces.range_(f"ProfilerStep#{step}", at, 90_000 + step % 7),
            traces.range_("forward", at + 1_000, 40_000),
            traces.op("aten::mm", at + 2_000, 9_000, shapes=[[8, 8], [8, 8]], dtypes=["float"] * 2),
            *traces.launched(name, at + 3_000, at + 5_000, at + 6_000, 9_000, step + 1),
            traces.call("cudaStreamSynchronize", at + 60_000, 500),
        ]
    return events


def explained(events: list[traces.Event], page: Path) -> tuple[Analysis, tuple[Finding, ...]]:
    analysis = analyze(trace_of(events, properties=H200))
    findings = explain(Case(analysis=analysis))
    write_explain_page(None, analysis, findings, page)
    return analysis, findings


def test_calls_grow_with_the_steps_and_not_with_their_square(tmp_path: Path) -> None:
    def calls(steps: int) -> int:
        events, count = many_steps(steps), 0

        def profile(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(profile)
        try:
            explained(events, tmp_path / "page.html")
        finally:
            sys.setprofile(None)
        return count

    calls(10)  # imports
    few, some, many = (calls(steps) for steps in (150, 300, 600))
    assert many - some < 2.1 * (some - few)


def test_memory_grows_with_the_steps_and_not_with_steps_times_names(tmp_path: Path) -> None:
    def peak(steps: int) -> int:
        events = many_steps(steps, own_names=True)
        tracemalloc.start()
        try:
            explained(events, tmp_path / "page.html")
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(10)
    assert peak(400) < 5 * peak(100)


@pytest.mark.slow
@pytest.mark.long
def test_a_trace_of_twenty_thousand_steps_comes_to_an_end(tmp_path: Path) -> None:
    analysis, findings = explained(many_steps(20_000), tmp_path / "page.html")
    assert len(analysis.budget.steps) == 20_000
    assert [finding.rule for finding in findings] == ["launch_bound", "synchronization"]


def work_of(rows: list[tuple[int, int, int, float, int]]) -> WorkTable:
    """Work of (start, duration, category, ideal, step), sorted by start."""
    table = np.array(sorted(rows, key=lambda row: row[0]), np.float64).reshape(-1, 5)
    start, duration, category, step = table[:, [0, 1, 2, 4]].T.astype(np.int64)
    none, unknown = np.zeros(len(rows), np.int32), np.full(len(rows), np.nan)
    codes = category.astype(np.int32)
    columns = (start, duration, codes, codes, step, *[none] * 5, np.full(len(rows), -1), start)
    return WorkTable(LABELS, *columns, unknown, unknown, table[:, 3], none)


KERNELS = st.lists(
    st.tuples(
        st.integers(0, 100),
        st.integers(0, 90),
        st.integers(1, 3),
        st.floats(1e-3, 50) | st.sampled_from([0.0, float("nan")]),
        st.integers(-1, 3),
    ),
    max_size=8,
)
STEPS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 40)), min_size=1, max_size=5)


def windows_of(steps: list[tuple[int, int]]) -> list[Window]:
    """Steps of (gap before, length)."""
    windows, clock = [], 0
    for number, (gap, length) in enumerate(steps):
        windows.append(Window(number, clock + gap, clock + gap + length))
        clock += gap + length
    return windows


@settings(deadline=None)
@given(KERNELS, STEPS)
def test_categories_agree_with_looking_at_every_kernel_in_every_step(rows, steps) -> None:
    work, windows = work_of(rows), windows_of(steps)
    found = kernel_categories(windows, work, np.arange(len(work)))
    for window, categories in zip(windows, found, strict=True):
        names = {category.name: category for category in categories}
        assert [c.ms for c in categories] == sorted((c.ms for c in categories), reverse=True)
        for code in range(1, 4):
            counted = modeled = ideal = 0.0
            launches, reached, known = 0, -1, False
            for row in range(len(work)):
                start, end = int(work.start[row]), int(work.start[row] + work.duration[row])
                own = set(range(max(start, reached), end)) & set(range(window.start, window.end))
                inside = set(range(start, end)) & set(range(window.start, window.end))
                reached = max(reached, end)
                if work.category[row] != code:
                    continue
                counted += len(own)
                launches += window.start <= start < window.end
                if not np.isnan(work.ideal[row]) and end > start:
                    modeled += len(own)
                    ideal += min(work.ideal[row], end - start) * len(inside) / (end - start)
            known = modeled > 0 or ideal > 0
            if not counted and not launches:
                assert LABELS[code] not in names
                continue
            category = names[LABELS[code]]
            assert category.launches == launches
            assert category.ms == pytest.approx(counted / 1e6, abs=1e-15)
            assert category.modeled_ms == pytest.approx(modeled / 1e6, abs=1e-15)
            assert (category.ideal_ms is not None) == known
            assert (category.ideal_ms or 0.0) == pytest.approx(ideal / 1e6, abs=1e-15)


@settings(deadline=None)
@given(KERNELS, st.integers(1, 4))
def test_medians_over_steps_agree_with_a_table_of_all_of_them(rows, steps) -> None:
    work = work_of(rows)
    windows = tuple(Window(number, number * 10, number * 10 + 9) for number in range(4)[:steps])
    inside = work.step < steps
    work = WorkTable(**{**vars(work), "step": np.where(inside, work.step, -1)})
    found = Rows(Analysis(None, None, windows, work, None, None))  # type: ignore[arg-type]
    table = np.zeros((len(LABELS), steps))
    for row in range(len(work)):
        if work.step[row] >= 0:
            table[work.category[row], work.step[row]] += work.duration[row]
    for code, label in enumerate(LABELS):
        spent = found.ms(found.category(label))
        assert spent == np.median(table[code]) / 1e6
    totals = {total.label: total.ms for total in found.totals("category", found.inside, 99)}
    present = np.unique(work.category[work.step >= 0]).tolist()
    assert totals == {LABELS[code]: np.median(table[code]) / 1e6 for code in present}
    busy = Rows(found.analysis, held_up=True)
    for code, label in enumerate(LABELS):
        taken = sorted(table[code][table[code] > 0])
        usual = len(taken) > steps // 2  # in most steps: the fastest of them counts
        assert busy.ms(busy.category(label)) == (taken[0] / 1e6 if usual else 0.0)


OPERATORS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(-1, 4), st.integers(0, 2)), max_size=14
)


@given(OPERATORS)
def test_makers_of_autograd_nodes_agree_with_trying_every_thread(rows) -> None:
    thread, sequence, forward_thread = np.array(rows, np.int64).reshape(-1, 3).T
    start = np.arange(len(rows))
    code = np.full(len(rows), -1, np.int32)
    spans = start, np.ones(len(rows), np.int64), code, thread.astype(np.int32)
    ops = Ops(*spans, sequence, forward_thread, *[code] * 4)
    wanted = np.full(len(rows), -1)
    for number in sorted({n for _, s, n in rows if n > 0 and s >= 0}):
        backward = [i for i, (_, s, n) in enumerate(rows) if n == number and s >= 0]
        best: list[int] = [-1] * len(backward)
        for one in sorted({t for t, s, n in rows if n <= 0 and s >= 0}):
            tried = [_maker(rows, i, one) for i in backward]
            if sum(m >= 0 for m in tried) > sum(m >= 0 for m in best):
                best = tried
        wanted[backward] = best
    assert forward_ops(ops).tolist() == wanted.tolist()


def _maker(rows: list[tuple[int, int, int]], backward: int, thread: int) -> int:
    """The last forward operator of a thread with the sequence number, if it began earlier."""
    same = [
        i for i, (t, s, n) in enumerate(rows) if n <= 0 and t == thread and s == rows[backward][1]
    ]
    return same[-1] if same and same[-1] <= backward else -1


def test_events_on_top_of_each_other_are_few_boxes() -> None:
    events = [traces.op("aten::mm", 0, 20_000) for _ in range(2 * MAX_BOXES)]
    step = traces.range_("ProfilerStep#0", 0, 20_000)
    analysis = analyze(trace_of([step, *events, *traces.launched("k", 1, 2, 3)]))
    window = typical_window(analysis)
    boxes = thin(step_lanes(analysis), window.end - window.start)
    assert sum(map(len, boxes)) < MAX_BOXES
    assert sum(box.count for lane in boxes for box in lane) >= 1


def test_a_nest_as_deep_as_the_trace_is_long_takes_one_lookup_each() -> None:
    depth = 5_000
    inner = [traces.op("a", at, 2 * depth - 2 * at) for at in range(depth)]
    after = [traces.op("b", 2 * depth + at, 1) for at in range(depth)]
    trace = trace_of([*inner, *after, traces.op("c", 0, 10 * depth)])
    attributed = analyze(trace)
    assert attributed.work.duration.sum() == 10 * depth
