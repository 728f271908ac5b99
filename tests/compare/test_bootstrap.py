import random

import numpy as np
import pytest

from steplab.compare.bootstrap import (
    CONFIDENCE,
    MAX_DRAWN,
    MIN_SAMPLES,
    RatioInterval,
    least_detectable,
    ratio_of_rounds,
    ratio_of_samples,
    student_quantile,
)
from steplab.core import Samples
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


def ratio_of(numerator, denominator):
    """Every sample a round of its own."""
    return ratio_of_rounds([[v] for v in numerator], [[v] for v in denominator])


def test_a_real_difference_is_seen_and_noise_is_not():
    source = random.Random(1)
    slow = [source.gauss(110, 2) for _ in range(30)]
    fast = [source.gauss(100, 2) for _ in range(30)]
    again = [source.gauss(100, 2) for _ in range(30)]
    real = ratio_of(slow, fast)
    assert real.excludes_one and real.low < 1.1 < real.high
    assert not ratio_of(again, fast).excludes_one


def test_the_interval_of_rounds_covers_as_often_as_it_says():
    """60 repetitions with equal distributions: 95 % intervals should rarely exclude one."""
    source = random.Random(2)
    wrong = 0
    for _ in range(60):
        a = [source.gauss(100, 3) for _ in range(20)]
        b = [source.gauss(100, 3) for _ in range(20)]
        wrong += ratio_of(a, b).excludes_one
    assert wrong <= 8


def test_same_samples_same_interval():
    assert ratio_of([1, 2, 3], [2, 3, 4]) == ratio_of([1, 2, 3], [2, 3, 4])


def test_rounds_that_differ_widen_the_interval():
    """Two equal specs whose rounds drift together: single steps would claim a difference."""
    source = random.Random(3)
    drift = [100, 130, 95, 120, 105, 90]
    a = [[source.gauss(d, 1) for _ in range(10)] for d in drift]
    b = [[source.gauss(d + source.gauss(0, 4), 1) for _ in range(10)] for d in drift]
    interval = ratio_of_rounds(a, b)
    assert not interval.excludes_one
    faster = ratio_of_rounds(a, [[v * 0.8 for v in values] for values in a])
    assert faster.excludes_one and faster.ratio == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (9, 2.26216), (100, 1.98397)],
)
def test_students_quantile_is_that_of_the_tables(freedom, expected):
    assert student_quantile(freedom) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("rounds", "expected"), [(3, 9.9248), (4, 5.8409), (5, 4.6041)])
def test_early_looks_are_at_99_percent(rounds, expected):
    assert student_quantile(rounds - 1, 0.99) == pytest.approx(expected, rel=1e-4)


def test_a_ratio_is_that_of_the_medians_shown_beside_it():
    """Of an even number: the lower of the middle two, as in `Samples.median`."""
    a, b = (3.0, 20.0, 2.0, 18.0, 2.5, 19.0), (1.0, 9.0, 1.0, 9.0, 1.5, 9.0)
    shown = Samples(a, "ms").median / Samples(b, "ms").median
    assert ratio_of_samples(a, b).ratio == shown == 2.0
    assert ratio_of_rounds([a[:2], a[2:4], a[4:]], [b[:2], b[2:4], b[4:]]).ratio == shown
