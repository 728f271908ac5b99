"""Windows over series, and their normalization."""

import numpy as np
import pytest

from steplab.core.errors import UserError
from steplab.data.windows import Normalizer, Windows, statistics

from .stubs import ListSeries


def plain_list_of_windows(lengths, length, stride):
    """The definition: a list of (series, start)."""
    found = []
    for series, points in enumerate(lengths):
        if points < 2:
            continue
        found.append((series, 0))
        found += [(series, s) for s in range(stride, points, stride) if s + length <= points]
    return found


@pytest.mark.parametrize("length", [2, 3, 8])
@pytest.mark.parametrize("stride", [1, 3, 8, 20])
def test_the_index_is_the_plain_list(length, stride):
    lengths = [0, 1, 2, 3, 7, 8, 9, 16, 17, 1, 40, 0]
    windows = Windows(ListSeries([np.arange(n) for n in lengths]), length, stride)
    expected = plain_list_of_windows(lengths, length, stride)
    assert [windows.locate(i) for i in range(len(windows))] == expected
    assert windows.skipped == {"fewer than 2 points": 4, "fewer than 2 finite points": 0}
    for outside in (-1, len(windows)):
        with pytest.raises(IndexError):
            windows.read(outside)


def test_the_first_window_is_padded_and_masked():
    values, mask = Windows(ListSeries([[5, 6, 7]]), 5, 5, "none").read(0)
    assert values.tolist() == [5, 6, 7, 0, 0] and values.dtype == np.float32
    assert mask.tolist() == [True, True, True, False, False]


def test_points_that_are_not_finite_are_masked_zeros():
    x = [1, np.nan, 3, np.inf, 5, -np.inf]
    values, mask = Windows(ListSeries([x]), 6, 6, "none").read(0)
    assert values.tolist() == [1, 0, 3, 0, 5, 0]
    assert mask.tolist() == [True, False, True, False, True, False]
    values, mask = Windows(ListSeries([x]), 8, 8, "series").read(0)
    assert values[mask] == pytest.approx(np.array([-1, 0, 1]) / np.sqrt(2 / 3), rel=1e-6)
    assert (values[~mask] == 0).all()


def test_a_window_reads_its_own_points_only():
    series = ListSeries([np.arange(1000)])
    Windows(series, 10, 10, "none").read(50)
    assert series.points_read == 10


def test_bad_windows_are_replaced_by_many_different_good_ones():
    bad, good = [[np.nan] * 4] * 300, [[i, i + 1, 0, 0] for i in range(700)]
    windows = Windows(ListSeries(bad + good), 4, 4, "none")
    first = [windows.read(i)[0][0] for i in range(300)]
    assert len(set(first)) > 250
    assert first == [windows.read(i)[0][0] for i in range(300)]
    scaled = Windows(ListSeries(bad + good), 4, 4)
    assert all(scaled.read(i)[1].sum() >= 2 for i in range(1000))
    assert scaled.skipped["fewer than 2 finite points"] == 300


def test_a_gap_inside_a_good_series_is_replaced_too():
    x = np.arange(40.0)
    x[8:16] = np.nan
    windows = Windows(ListSeries([x]), 8, 8, "none")
    assert all(windows.read(i)[1].sum() == 8 for i in range(len(windows)))
    assert windows.skipped["fewer than 2 finite points"] == 0


def test_a_million_tiny_series():
    class Tiny(ListSeries):
        def __init__(self):
            self.name, self.lengths = "tiny", np.tile(np.array([1, 2, 3, 5], np.int64), 250_000)

        def __len__(self):
            return len(self.lengths)

        def read(self, index, start, stop):
            return np.arange(start, stop, dtype=np.float32)

    windows = Windows(Tiny(), 4097, 4096)
    assert len(windows) == 750_000 and windows.skipped["fewer than 2 points"] == 250_000
    assert windows.locate(749_999) == (999_999, 0)
    assert windows.read(500_000)[1].sum() == windows.series.lengths[windows.locate(500_000)[0]]


@pytest.mark.parametrize(("length", "stride"), [(1, 1), (0, 5), (4, 0), (4, -1)])
def test_impossible_windows(length, stride):
    with pytest.raises(UserError, match="not possible"):
        Windows(ListSeries([[1, 2, 3]]), length, stride)


def test_any_error_of_a_reader_names_the_series_and_the_point():
    class Broken(ListSeries):
        def read(self, index, start, stop):
            raise OSError("the disk is gone")

    windows = Windows(Broken([[1, 2, 3], [4, 5, 6]], "broken.bin"), 3, 3)
    with pytest.raises(UserError, match=r"broken\.bin: series 1 .* point 0: the disk is gone"):
        windows.read(1)


@pytest.mark.parametrize("chunk", [1, 3, 7, 1000])
def test_chunked_statistics_equal_numpy_in_float64(chunk):
    x = np.random.default_rng(0).normal(1e4, 0.5, 100).astype(np.float32)
    found = statistics(ListSeries([x]), 0, chunk)
    exact = x.astype(np.float64)
    assert found.finite == 100 and (found.low, found.high) == (exact.min(), exact.max())
    assert found.mean == pytest.approx(exact.mean(), rel=1e-14)
    assert found.squares / 100 == pytest.approx(exact.var(), rel=1e-9)


def test_a_window_is_scaled_by_its_whole_series():
    x = np.random.default_rng(1).normal(50, 9, 64).astype(np.float32)
    exact = x.astype(np.float64)
    by_series = Normalizer(ListSeries([x]), "series").apply(0, x[10:20])
    assert by_series == pytest.approx(((exact - exact.mean()) / exact.std())[10:20], abs=1e-6)
    assert Normalizer(ListSeries([x]), "max").apply(0, x[3:5]) == pytest.approx(
        (exact / np.abs(exact).max())[3:5], rel=1e-6
    )
    assert (Normalizer(ListSeries([x]), "none").apply(0, x) == x).all()


def test_statistics_leave_out_what_is_not_finite():
    x = [1.0, np.nan, 3.0, np.inf, -np.inf, 5.0]
    scaled = Normalizer(ListSeries([x]), "series").apply(0, np.array([1, 3, 5], np.float32))
    assert scaled == pytest.approx(np.array([-1, 0, 1]) / np.sqrt(2 / 3), rel=1e-6)


@pytest.mark.parametrize("value", [0.1, -7.0, 0.0, 3e38])
def test_a_constant_series_becomes_zero(value):
    x = np.full(1001, value, np.float32)
    assert (Normalizer(ListSeries([x]), "series").apply(0, x) == 0).all()


def test_a_series_of_zeros_stays_zero_under_max():
    assert (Normalizer(ListSeries([[0, 0]]), "max").apply(0, np.zeros(2, np.float32)) == 0).all()


def test_a_series_is_read_whole_only_once_and_not_at_all_for_none():
    series = ListSeries([np.arange(100), np.arange(50)])
    scaler = Normalizer(series, "series")
    assert series.points_read == 0
    for _ in range(3):
        scaler.apply(0, np.zeros(2, np.float32))
    assert series.points_read == 100
    untouched = ListSeries([np.arange(100)])
    Normalizer(untouched, "none").apply(0, np.zeros(2, np.float32))
    assert untouched.points_read == 0


def test_series_without_two_finite_points_are_counted_as_they_are_touched():
    scaler = Normalizer(ListSeries([[np.nan] * 5, [1, np.nan], [1, 2]]), "max")
    assert scaler.unusable == 0
    assert [scaler.usable(i) for i in range(3)] == [False, False, True]
    assert scaler.unusable == 2


def test_an_unknown_mode_gets_a_suggestion():
    with pytest.raises(UserError, match="Did you mean 'series'"):
        Normalizer(ListSeries([[1, 2]]), "serie")
