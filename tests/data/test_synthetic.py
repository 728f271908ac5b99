import hashlib

import numpy as np
import pytest

from steplab.core.errors import UserError
from steplab.data.synthetic import (
    FAMILIES,
    HELD_OUT_FAMILIES,
    TRAIN_FAMILIES,
    VERSION,
    SyntheticSeries,
)

GOLDEN = {
    "trend_seasonal": "18f80e7e2afbe429",
    "multi_seasonal": "d026202bd958a317",
    "regime_change": "8866df6f8f242087",
    "intermittent": "88f7f5905f3aa11f",
    "heteroscedastic": "216c17efacd1d9c1",
    "random_walk": "0ed410f2e1b48280",
    "autoregressive": "e8284cc2de5b364e",
    "chirp": "0e6f5b2cd64d33df",
    "logistic_map": "f689970cc9de0781",
    "square_wave": "5ca1fc4039832a86",
}
LENGTH = 600


def whole(series, index):
    return series.read(index, 0, int(series.lengths[index]))


def fingerprint(family):
    series = SyntheticSeries(3, LENGTH, 2024, (family,))
    values = np.concatenate([whole(series, i) for i in range(3)]).astype(np.float64)
    return hashlib.sha256((np.round(values * 1e4) + 0.0).astype("<i8").tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_series_of_version_1_stay_what_they_are(family):
    assert VERSION == 1 and fingerprint(family) == GOLDEN[family]


def test_series_are_decided_by_seed_and_index_not_by_the_order_of_reading():
    a, b = SyntheticSeries(20, 100, 5), SyntheticSeries(20, 100, 5)
    forward = [whole(a, i) for i in range(20)]
    backward = [whole(b, i) for i in reversed(range(20))][::-1]
    assert all((x == y).all() for x, y in zip(forward, backward, strict=True))
    assert (whole(SyntheticSeries(20, 100, 6), 0) != forward[0]).any()
    assert (forward[0] != forward[7]).any()  # the same family


def test_a_window_is_a_slice_of_the_whole_and_its_own_memory():
    series = SyntheticSeries(3, 50, 0)
    window = series.read(1, 10, 20)
    assert (window == whole(series, 1)[10:20]).all()
    window[:] = 0
    assert (series.read(1, 10, 20) != 0).any()
    with pytest.raises(IndexError):
        series.read(1, 40, 51)


def test_families_take_turns_and_some_are_held_out():
    series = SyntheticSeries(2 * len(TRAIN_FAMILIES), 32, 0)
    assert [series.family(i) for i in range(len(series))] == list(TRAIN_FAMILIES) * 2
    assert not set(TRAIN_FAMILIES) & set(HELD_OUT_FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_finite_and_moves(family):
    for length in (1, 2, 3, 700):
        series = SyntheticSeries(20, length, 1, (family,))
        for index in range(20):
            values = whole(series, index)
            assert len(values) == length and np.isfinite(values).all()
            assert length < 700 or values.std() > 0


@pytest.mark.parametrize(
    "family", ["trend_seasonal", "multi_seasonal", "autoregressive", "square_wave"]
)
def test_the_period_given_is_in_the_series(family):
    series = SyntheticSeries(40, 2000, 9, (family,))
    found = []
    for index in range(40):
        steps = np.diff(whole(series, index).astype(np.float64))
        lag = round(series.period(index))
        found.append(np.corrcoef(steps[:-lag], steps[lag:])[0, 1])
    assert np.median(found) > 0.3


def test_what_the_names_promise():
    series = SyntheticSeries(40, 3000, 4, ("intermittent", "heteroscedastic"))
    for index in range(0, 40, 2):
        demand = whole(series, index)
        assert (demand == np.floor(demand)).all() and (demand >= 0).all()
        assert (demand == 0).mean() > 0.5
    clustered = []
    for index in range(1, 40, 2):
        size = np.abs(np.diff(whole(series, index).astype(np.float64)))
        clustered.append(np.corrcoef(size[:-5], size[5:])[0, 1])
        assert series.period(index) is None
    assert np.median(clustered) > 0.05


@pytest.mark.parametrize("arguments", [(0, 5, 0), (5, 0, 0), (5, 5, -1), (5, 5, 0, ())])
def test_impossible_sets(arguments):
    with pytest.raises(UserError, match="cannot be made"):
        SyntheticSeries(*arguments)


def test_an_unknown_family_gets_a_suggestion():
    with pytest.raises(UserError, match="Did you mean 'chirp'"):
        SyntheticSeries(5, 5, 0, ("chrip",))
