"""How many rounds it takes to tell two steps apart."""

import numpy as np
import pytest

from steplab.record import Samples
from steplab.tune.turns import PEEKS, ROUNDS, student_ratio, take_turns


class Side:
    """Takes `ms` a step, give or take; counts its turns."""

    def __init__(self, ms, spread=0.01, seed=0):
        self.ms, self.spread, self.turns = ms, spread, 0
        self.source = np.random.default_rng(seed)

    def turn(self, steps, timeout):
        self.turns += 1
        mood = self.ms * self.source.normal(1, self.spread)  # of the round
        return Samples(tuple(mood * self.source.normal(1, 0.001, steps)), "ms")


def raced(before, after, **more):
    first, second = Side(before, seed=1, **more), Side(after, seed=2, **more)
    turns = take_turns(first, second, before, 60.0, lambda text: None)
    assert first.turns == second.turns
    return turns, first.turns


@pytest.mark.parametrize(("after", "verdict"), [(60.0, "faster"), (150.0, "slower")])
def test_a_clear_difference_takes_three_rounds(after, verdict):
    turns, rounds = raced(100.0, after)
    assert rounds == min(PEEKS) and turns.verdict == verdict
    assert turns.change.low < after / 100 - 1 < turns.change.high
    assert turns.change.confidence == 0.99 and len(turns.before.values) >= 2 * min(PEEKS)


def test_a_small_difference_takes_more_and_none_takes_all():
    turns, rounds = raced(100.0, 97.0)
    assert min(PEEKS) < rounds and turns.verdict == "faster"
    turns, rounds = raced(100.0, 100.0)
    assert rounds == 2 * ROUNDS and turns.verdict == "cannot tell"


def test_the_quantiles_are_students():
    """Rounds of equal steps are told apart by peeking in about 2 % of the cases, not in 5."""
    source, wrong = np.random.default_rng(3), 0
    for _ in range(2000):
        ratios = np.exp(source.normal(0, 0.02, max(PEEKS)))
        wrong += any(student_ratio(ratios[:n]).excludes_one for n in PEEKS)
    assert 0.01 < wrong / 2000 < 0.03
    one, two = student_ratio([0.8, 0.82, 0.84]), student_ratio([0.8, 0.82, 0.84, 0.82])
    assert one.low < two.low < two.ratio < two.high < one.high
