import numpy as np
import pytest

from steplab.core.errors import UserError
from steplab.data.normalization import Normalizer, statistics

from .stubs import ListSeries


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
