import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

from steplab.core.errors import UserError
from steplab.data.clean import FLAT, NOT_FINITE, TOO_SHORT, CleaningRule, clean, is_flat, stretches
from steplab.data.formats import open_series
from steplab.data.formats.time300b import SeriesWriter

from .stubs import ListSeries

QUICK = settings(max_examples=200)
# Few different values: stretches that stand still, and holes, are frequent.
VALUES = st.sampled_from([0.0, 1.0, 2.5, 7.0, -3.0, np.nan, np.inf])
SERIES = st.lists(
    st.lists(VALUES | st.floats(-9, 9, width=32), max_size=60), min_size=1, max_size=4
)
RULES = st.builds(
    CleaningRule, st.integers(3, 9), st.sampled_from([0.0, 0.2, 0.5, 1.0]), st.integers(1, 12)
)


class Kept:
    """Stands in for the writer."""

    def __init__(self):
        self.runs, self._open = [], []

    def append(self, points):
        self._open.extend(points.tolist())

    def end_series(self):
        self.runs.append(self._open)
        self._open = []


def cleaned(arrays, rule, chunk=7):
    kept = Kept()
    tally = clean(ListSeries(arrays), rule, kept, chunk=chunk)
    assert not kept._open
    return kept.runs, tally


def by_the_book(points, rule):
    """The rule in plain Python: split, tile, judge, join, measure."""
    runs, run = [], []
    for value in [*np.float32(points).tolist(), np.nan]:
        if np.isfinite(value):
            run.append(value)
            continue
        kept = []
        for begin in range(0, len(run), rule.window):
            window = run[begin : begin + rule.window]
            first = [b - a for a, b in pairwise(window)]
            second = [b - a for a, b in pairwise(first)]
            if any(d and d.count(0) / len(d) > rule.most_zeros for d in (first, second)):
                runs.append(kept)
                kept = []
            else:
                kept = kept + window
        runs.append(kept)
        run = []
    return [run for run in runs if run and len(run) >= rule.shortest]


@given(SERIES, RULES, st.integers(1, 70))
@QUICK
def test_chunked_equals_the_rule_by_the_book(arrays, rule, chunk):
    runs, _ = cleaned(arrays, rule, chunk)
    assert runs == [run for array in arrays for run in by_the_book(array, rule)]


@given(SERIES, RULES)
@QUICK
def test_nothing_bad_is_left_and_no_point_is_lost_from_sight(arrays, rule):
    runs, tally = cleaned(arrays, rule)
    assert all(np.isfinite(run).all() and len(run) >= rule.shortest for run in runs)
    assert tally.points == sum(map(len, arrays)) and tally.series == len(arrays)
    assert tally.kept_series == len(runs) and tally.kept_points == sum(map(len, runs))
    assert tally.kept_points + sum(tally.dropped_points.values()) == tally.points
    not_finite = sum(int((~np.isfinite(array)).sum()) for array in arrays)
    assert tally.dropped_points[NOT_FINITE] == not_finite
    assert all(1 <= count <= len(arrays) for count in tally.dropped_from.values())


@given(SERIES, RULES)
@QUICK
def test_cleaning_twice_is_cleaning_once(arrays, rule):
    once, _ = cleaned(arrays, rule)
    twice, tally = cleaned(once, rule) if once else (once, None)
    assert twice == once and (tally is None or not tally.dropped_points)


def test_reasons():
    wave = np.sin(np.arange(300.0))
    still = np.full(256, 5.0)
    ramp = np.arange(256.0) * 0.5
    runs, tally = cleaned(
        [
            np.concatenate([wave[:256], still, wave[:100]]),
            ramp,
            np.concatenate([wave[:9], [np.nan], wave]),
        ],
        CleaningRule(),
    )
    assert [len(run) for run in runs] == [256, 100, 300]
    assert tally.dropped_points == {FLAT: 512, NOT_FINITE: 1, TOO_SHORT: 9}
    assert tally.dropped_from == {FLAT: 2, NOT_FINITE: 1, TOO_SHORT: 1}
    assert tally.lost_series == 1


def test_a_fifth_of_zeros_is_allowed_and_more_is_not():
    steps = np.ones(10) * np.array([1, 3, 1, 4, 1, 5, 9, 2, 6, 5.0])
    for zeros, flat in ((2, False), (3, True)):
        window = np.concatenate([[0], np.cumsum(np.where(np.arange(10) < zeros, 0, steps))])
        assert is_flat(window[None].astype(np.float32), 0.2).tolist() == [flat]


def test_large_values_do_not_overflow():
    huge = np.array([[3e38, -3e38] * 8], np.float32)
    assert not is_flat(huge, 0.2).any()


def test_stretches():
    assert list(stretches(np.array([], bool))) == []
    marks = np.array([1, 1, 0, 1], bool)
    assert list(stretches(marks)) == [(0, 2, True), (2, 3, False), (3, 4, True)]


def test_the_result_is_a_folder_that_opens():
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        source = ListSeries([np.sin(np.arange(40.0)), [np.nan] * 5])
        with SeriesWriter(out) as writer:
            clean(source, CleaningRule(), writer)
        found = open_series(out)
        assert found.lengths.tolist() == [40]
        assert (found.read(0, 0, 40) == source.arrays[0]).all()


@pytest.mark.parametrize("rule", [(2, 0.2, 16), (128, 1.5, 16), (128, float("nan"), 1), (9, 0, 0)])
def test_wrong_rules(rule):
    with pytest.raises(UserError):
        CleaningRule(*rule)


def test_memory_stays_bounded():
    import tracemalloc

    class Long:
        """Four million points that nobody holds."""

        name, lengths = "long", np.array([4_000_000])

        def __len__(self):
            return 1

        def read(self, index, start, stop):
            return np.sin(np.arange(start, stop, dtype=np.float32))

    class Nowhere:
        points = 0

        def append(self, points):
            self.points += len(points)

        def end_series(self):
            pass

    sink = Nowhere()
    tracemalloc.start()
    clean(Long(), CleaningRule(), sink, chunk=2**14)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sink.points > 3_900_000 and peak < 2 * 2**20  # the series alone is 15 MiB
