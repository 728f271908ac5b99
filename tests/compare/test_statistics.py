import random

import pytest

from steplab.compare.bootstrap import line_fit, local_exponent, ratio_of_rounds


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


def test_the_interval_covers_as_often_as_it_says():
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


def test_exponent_and_line():
    assert local_exponent(128, 2.0, 512, 32.0) == pytest.approx(2.0)
    assert line_fit([1, 2, 3], [5, 7, 9]) == (pytest.approx(3), pytest.approx(2))


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
