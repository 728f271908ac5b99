"""Sets of instants against sets of whole numbers; nested spans against a search one by one."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steplab.trace.events import Spans
from steplab.trace.spans import EMPTY, Intervals, nest, union

END = 40
SPANS = st.lists(st.tuples(st.integers(0, END), st.integers(0, 8)), max_size=12)


def built(spans) -> Intervals:
    return union([start for start, _ in spans], [start + length for start, length in spans])


def instants(spans) -> set[int]:
    return {t for start, length in spans for t in range(start, start + length)}


def members(found: Intervals) -> set[int]:
    pairs = list(zip(found.start.tolist(), found.end.tolist(), strict=True))
    assert all(start < end for start, end in pairs)
    assert all(before[1] < after[0] for before, after in pairwise(pairs))
    return {t for start, end in pairs for t in range(start, end)}


@given(SPANS, SPANS)
def test_sets_of_instants(a, b):
    here, there = built(a), built(b)
    assert members(here) == instants(a)
    assert members(here | there) == instants(a) | instants(b)
    assert members(here & there) == instants(a) & instants(b)
    assert members(here - there) == instants(a) - instants(b)


@given(SPANS, st.integers(-5, 60), st.integers(0, 30))
def test_parts(spans, low, length):
    found = built(spans)
    inside = {t for t in instants(spans) if low <= t < low + length}
    assert members(found.clip(low, low + length)) == inside
    assert found.within(low, low + length) == len(inside)
    assert found.total == len(instants(spans))


def test_many_parts_at_once():
    found = union([0, 10], [5, 20])
    assert found.within([0, 4, 12], [100, 11, 12]).tolist() == [15, 2, 0]


def test_nanoseconds_of_this_century_are_exact():
    now = 1_790_000_000_123_456_789
    assert union([now], [now + 1]).total == 1


def test_nothing():
    assert len(EMPTY) == 0 and EMPTY.total == 0 and EMPTY.within(0, 9) == 0
    some = union([3], [5])
    assert members(EMPTY | some) == members(some - EMPTY) == {3, 4}
    assert members(EMPTY & some) == members(EMPTY - some) == set()


@pytest.mark.parametrize("empty", [[5], [7]])
def test_spans_without_length_cover_nothing(empty):
    assert len(union(np.array(empty), np.array([5]))) == 0


def spans(*rows: tuple[int, int, int]) -> Spans:
    """Spans of (start, end, thread), sorted by start as tables are."""
    table = np.array(sorted(rows, key=lambda row: row[0]), np.int64).reshape(-1, 3)
    zeros = np.zeros(len(table), np.int32)
    return Spans(table[:, 0], table[:, 1] - table[:, 0], zeros, table[:, 2].astype(np.int32))


def test_parents_and_self_times_of_two_threads():
    table = spans((0, 100, 0), (10, 40, 0), (10, 20, 1), (20, 30, 0), (50, 60, 0), (70, 90, 1))
    found = nest(table)
    parent = dict(zip(map(int, table.start * 10 + table.thread), found.parents(), strict=True))
    assert parent == {0: -1, 100: 0, 101: -1, 200: 1, 500: 0, 701: -1}
    assert found.self_time().tolist() == [60, 20, 10, 10, 10, 20]


def test_the_last_opened_span_is_found_until_it_ends():
    found = nest(spans((0, 100, 0), (10, 40, 0), (20, 30, 0)))
    times = np.array([-5, 0, 15, 20, 29, 30, 40, 99, 100])
    rows = found.innermost(np.zeros(9, np.int64), times)
    assert rows.tolist() == [-1, 0, 1, 2, 2, 1, 0, 0, -1]
    assert found.innermost(np.ones(9, np.int64), times).tolist() == [-1] * 9
    assert found.innermost(np.full(9, -1), times).tolist() == [-1] * 9


def test_of_spans_with_one_start_the_longer_is_the_parent():
    table = spans((0, 5, 0), (0, 9, 0), (0, 0, 0))
    assert nest(table).parents().tolist() == [1, -1, 0]


def test_an_overlap_ends_with_its_parent():
    found = nest(spans((0, 10, 0), (5, 12, 0), (11, 20, 0)))
    assert found.parents().tolist() == [-1, 0, -1]
    assert found.self_time().tolist() == [5, 5, 9]


def test_only_chosen_spans_count():
    table = spans((0, 100, 0), (10, 90, 0), (20, 30, 0))
    found = nest(table, np.array([True, False, True]))
    assert found.parents().tolist() == [-1, -1, 0]
    assert found.innermost(np.array([0, 0]), np.array([15, 25])).tolist() == [0, 2]


def test_threads_can_be_taken_as_one():
    found = nest(spans((0, 100, 3), (10, 20, 7)), across_threads=True)
    assert found.innermost(np.zeros(2, np.int64), np.array([15, 50])).tolist() == [1, 0]


def test_nothing_nests_in_nothing():
    found = nest(spans())
    assert found.innermost(np.array([0]), np.array([5])).tolist() == [-1]
    assert len(found.parents()) == len(found.self_time()) == 0


@st.composite
def forests(draw) -> list[tuple[int, int, int]]:
    """Random nested spans of three threads, from brackets opened and closed."""
    rows = []
    for thread in range(3):
        open_: list[int] = []
        clock = 0
        for opens in draw(st.lists(st.booleans(), max_size=30)):
            clock += draw(st.integers(1, 5))
            if opens:
                open_.append(clock)
            elif open_:
                rows.append((open_.pop(), clock, thread))
        while open_:
            clock += 1
            rows.append((open_.pop(), clock, thread))
    return rows


# No deadline: on a busy machine one example may take long.
@settings(deadline=None, max_examples=60)
@given(forests(), st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 200)), max_size=20))
def test_a_nest_agrees_with_looking_at_every_pair(rows, asked):
    table = spans(*rows)
    found = nest(table)
    starts, ends, threads = table.start.tolist(), table.end.tolist(), table.thread.tolist()

    def around(thread: int, time: int, but: int = -1) -> int:
        open_ = [
            i
            for i in range(len(starts))
            if threads[i] == thread and starts[i] <= time < ends[i] and i != but
        ]
        return max(open_, key=lambda i: (starts[i], -ends[i]), default=-1)

    wanted = [around(thread, time) for thread, time in asked]
    thread, time = (np.array([pair[i] for pair in asked], np.int64) for i in (0, 1))
    assert found.innermost(thread, time).tolist() == wanted
    parents = [around(threads[i], starts[i], but=i) for i in range(len(starts))]
    assert found.parents().tolist() == parents
    children = [
        sum(ends[j] - starts[j] for j in range(len(parents)) if parents[j] == i)
        for i in range(len(parents))
    ]
    own = [ends[i] - starts[i] - children[i] for i in range(len(parents))]
    assert found.self_time().tolist() == own
