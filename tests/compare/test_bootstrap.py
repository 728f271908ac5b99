import numpy as np
import pytest

from steplab.compare.bootstrap import (
    CONFIDENCE,
    MAX_DRAWN,
    MIN_SAMPLES,
    RatioInterval,
    least_detectable,
    ratio_of_samples,
)
from tests.compare.sides import noisy


def test_a_real_change_is_seen_and_noise_is_not():
    slower = ratio_of_samples(noisy(110, seed=1), noisy(100, seed=2))
    assert slower.low > 1 and slower.low < 1.1 < slower.high
    assert ratio_of_samples(noisy(100, seed=1), noisy(110, seed=2)).high < 1
    assert not ratio_of_samples(noisy(100, seed=1), noisy(100, seed=2)).excludes_one


def test_turning_the_sides_round_turns_the_ratio_round():
    a, b = noisy(100, 15, seed=3), noisy(93, 22, seed=4)
    forth, back = ratio_of_samples(a, b), ratio_of_samples(b, a)
    assert forth.ratio == pytest.approx(1 / back.ratio)
    assert forth.low == pytest.approx(1 / back.high, rel=0.01)


@pytest.mark.parametrize("count", [MIN_SAMPLES, 10, 40])
def test_the_interval_covers_as_often_as_it_says(count):
    """100 pairs of equal distributions: by chance about 5 intervals leave one out."""
    source = np.random.default_rng(count)
    pairs = source.normal(100, 3, (100, 2, count))
    wrong = sum(ratio_of_samples(a, b).excludes_one for a, b in pairs)
    assert wrong <= 10


def test_neighbors_that_resemble_each_other_widen_the_interval():
    source = np.random.default_rng(1)
    moods = np.repeat(source.normal(100, 3, (2, 10)), 10, axis=1)
    shuffled = source.permuted(moods, axis=1)
    mood, mixed = ratio_of_samples(*moods), ratio_of_samples(*shuffled)
    assert mood.high - mood.low > 1.5 * (mixed.high - mixed.low)


def test_many_samples_are_drawn_in_parts():
    count = MAX_DRAWN // 1000
    wide = ratio_of_samples(noisy(100, count, 0.1, 1), noisy(100, count, 0.1, 2))
    assert 0.98 < wide.low < 1.02 and 0.98 < wide.high < 1.02


def test_samples_that_are_all_equal():
    assert ratio_of_samples([5.0] * 10, [10.0] * 10) == RatioInterval(0.5, 0.5, 0.5)
    assert ratio_of_samples([5.0], [10.0]).ratio == 0.5


def test_a_change_of_the_detectable_size_is_seen_four_times_in_five():
    source = np.random.default_rng(5)
    equal = source.normal(100, 3, (25, 2, 20))
    least = float(np.median([least_detectable(ratio_of_samples(a, b)) for a, b in equal]))
    pairs = source.normal(100, 3, (100, 2, 20))
    seen = sum(ratio_of_samples(a * (1 + least), b).low > 1 for a, b in pairs)
    assert 65 <= seen <= 95


def test_twice_the_spread_hides_twice_the_change():
    narrow, wide = RatioInterval(1.0, 0.99, 1 / 0.99), RatioInterval(1.0, 0.99**2, 1 / 0.99**2)
    assert least_detectable(wide) == pytest.approx(2 * least_detectable(narrow), rel=0.02)
    assert least_detectable(RatioInterval(2.0, 2.0, 2.0)) == 0 and CONFIDENCE == 0.95
