from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steplab.trace.intervals import EMPTY, Intervals, union

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
