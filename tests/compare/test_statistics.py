import random

import pytest

from steplab.compare.statistics import line_fit, local_exponent, median_ratio


def test_a_real_difference_is_seen_and_noise_is_not():
    source = random.Random(1)
    slow = [source.gauss(110, 2) for _ in range(30)]
    fast = [source.gauss(100, 2) for _ in range(30)]
    again = [source.gauss(100, 2) for _ in range(30)]
    real = median_ratio(slow, fast)
    assert real.excludes_one and real.low < 1.1 < real.high
    assert not median_ratio(again, fast).excludes_one


def test_the_interval_covers_as_often_as_it_says():
    """60 repetitions with equal distributions: 95 % intervals should rarely exclude one."""
    source = random.Random(2)
    wrong = 0
    for _ in range(60):
        a = [source.gauss(100, 3) for _ in range(20)]
        b = [source.gauss(100, 3) for _ in range(20)]
        wrong += median_ratio(a, b).excludes_one
    assert wrong <= 8


def test_same_samples_same_interval():
    assert median_ratio([1, 2, 3], [2, 3, 4]) == median_ratio([1, 2, 3], [2, 3, 4])


def test_exponent_and_line():
    assert local_exponent(128, 2.0, 512, 32.0) == pytest.approx(2.0)
    assert line_fit([1, 2, 3], [5, 7, 9]) == (pytest.approx(3), pytest.approx(2))
