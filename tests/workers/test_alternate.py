"""How many rounds it takes to tell two steps apart."""

import numpy as np
import pytest

from steplab.core import Samples
from steplab.core.errors import MeasurementError
from steplab.workers.alternate import (
    LATE_LOOKS,
    MAX_SECONDS,
    PEEKS,
    ROUNDS,
    USUAL_ROUNDS,
    Patience,
    alternate_specs,
    alternate_until_clear,
    pool_rounds,
    round_seconds,
    seconds_per_rung,
    student_ratio,
)


class Side:
    """Takes `ms` a step, give or take; counts its turns."""

    def __init__(self, ms, spread=0.01, seed=0):
        self.ms, self.spread, self.turns = ms, spread, 0
        self.source = np.random.default_rng(seed)

    def measure(self, steps, timeout):
        self.turns += 1
        mood = self.ms * self.source.normal(1, self.spread)  # of the round
        return Samples(tuple(mood * self.source.normal(1, 0.001, steps)), "ms")


def raced(before, after, seconds=30.0, gain=None, seed=1, patience=None, **more):
    first, second = Side(before, seed=seed, **more), Side(after, seed=seed + 1, **more)
    turns = alternate_until_clear(
        first, second, step_ms=before, seconds=seconds, timeout=60.0, gain=gain, patience=patience
    )
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


def test_turns_end_when_no_gain_is_in_reach():
    """Equal steps: after six rounds the interval is 1 % to either side, and 5 % are asked for."""
    turns, rounds = raced(100.0, 100.0, gain=0.05)
    assert rounds <= ROUNDS and turns.verdict == "cannot tell" and turns.change.low > -0.05
    assert raced(100.0, 100.0, gain=0.001)[1] == 2 * ROUNDS


EVER, NEVER = 1e18, 0.0  # by the clock


def test_with_patience_there_are_more_looks_as_sure_as_the_first():
    """A gain of 3 % under noise of 4 % a round and side."""
    usual, rounds = raced(100.0, 97.0, spread=0.04)
    assert rounds == USUAL_ROUNDS and usual.verdict == "cannot tell"
    turns, rounds = raced(100.0, 97.0, spread=0.04, patience=Patience(EVER, 0.001))
    assert rounds in LATE_LOOKS and turns.verdict == "faster"
    assert turns.change.confidence == 0.99 and turns.change.high < 0


def test_patience_ends_once_too_little_is_in_reach():
    turns, rounds = raced(100.0, 100.0, spread=0.05, seed=7, patience=Patience(EVER, 0.02))
    assert rounds in LATE_LOOKS and turns.verdict == "cannot tell" and turns.change.low > -0.02
    _, all_rounds = raced(100.0, 100.0, spread=0.03, patience=Patience(EVER, 0.0001))
    assert all_rounds == LATE_LOOKS[-1]


def test_patience_ends_with_its_time_and_is_not_less_than_usual(monkeypatch):
    """A second a round; by the last look there are 20 rounds, which no plan of looks has."""
    clock = iter(range(1000))
    monkeypatch.setattr("steplab.workers.alternate.monotonic", lambda: next(clock))
    turns, rounds = raced(100.0, 100.0, 2.5, spread=0.03, patience=Patience(19.5, 0.0001))
    assert rounds == 20 and turns.change.confidence == 0.99
    _, rounds = raced(100.0, 100.0, 8.5, spread=0.03, patience=Patience(NEVER, 0.0001))
    assert rounds == 9


def test_what_was_undecided_before_is_looked_at_more_strictly():
    """Equal steps are told apart less often than by looks at 95 %, with eight times the rounds."""
    seeds, patience = range(0, 100, 2), Patience(EVER, 1e-9, again=True)
    usual = [raced(100.0, 100.0, spread=0.03, seed=seed)[0] for seed in seeds]
    again = [raced(100.0, 100.0, spread=0.03, seed=seed, patience=patience)[0] for seed in seeds]
    assert {turns.change.confidence for turns in again} == {0.99}
    told = [sum(one.verdict != "cannot tell" for one in turns) for turns in (usual, again)]
    assert told[0] > told[1]


def test_all_looks_of_a_second_try_together_are_wrong_in_a_twentieth_of_the_cases():
    source, wrong = np.random.default_rng(5), 0
    looks = (*PEEKS, ROUNDS, USUAL_ROUNDS, *LATE_LOOKS)
    for _ in range(2000):
        ratios = np.exp(source.normal(0, 0.02, LATE_LOOKS[-1]))
        wrong += any(student_ratio(ratios[:n]).excludes_one for n in looks)
    assert 0.03 < wrong / 2000 < 0.065


def test_a_round_takes_as_long_as_its_steps():
    assert round_seconds(100.0, 50.0) == pytest.approx(3 * 0.15)
    assert round_seconds(10.0, 5.0) == pytest.approx(30 * 0.015)


@pytest.mark.parametrize("fit", [1, 4, 8])
def test_a_busy_machine_ends_the_turns_and_the_interval_stays_wide(monkeypatch, fit):
    """Rounds of a second each, three in any case. By chance, equal steps are told apart in 1 %
    of 400 cases where 4 rounds fit, in 9 % where 8 do, and in 10 % without a bound."""
    told = 0
    for seed in range(0, 40, 2):
        seconds = iter(range(100))
        monkeypatch.setattr("steplab.workers.alternate.monotonic", lambda left=seconds: next(left))
        turns, rounds = raced(100.0, 100.0, fit - 0.5, spread=0.3, seed=seed)
        assert rounds <= max(fit, min(PEEKS))
        told += turns.verdict != "cannot tell"
        if turns.verdict == "cannot tell":
            assert rounds == max(fit, min(PEEKS)) and turns.change.low < 0 < turns.change.high
    assert told <= 5  # of 20; more than that has a chance of 1 in 100 at 9 %


@pytest.mark.parametrize(
    ("ms", "steps"),
    [(1, 50), (10, 30), (47, 6), (100, 3), (220, 3), (330, 3), (500, 2), (900, 1), (2000, 1)],
)
def test_a_round_has_three_steps_where_they_take_about_a_second_at_most(ms, steps):
    turns, rounds = raced(float(ms), ms * 0.5, spread=0.0)
    assert rounds == min(PEEKS)
    assert len(turns.before.values) == len(turns.after.values) == steps * rounds


def test_one_held_up_step_in_a_round_decides_nothing():
    """Steps of 220 ms, the host holding up one step of every other round by half of it."""

    class HeldUp(Side):
        def measure(self, steps, timeout):
            values = super().measure(steps, timeout).values
            late = self.turns % 2 == 0
            return Samples((values[0] * (1.5 if late else 1.0), *values[1:]), "ms")

    first, second = HeldUp(220.0, seed=1), Side(200.0, seed=2)
    turns = alternate_until_clear(first, second, step_ms=220.0, seconds=30.0, timeout=60.0)
    assert turns.verdict == "faster" and turns.change.low > -0.15 and turns.change.high < -0.05


def test_one_rung_may_take_a_share_of_the_budget():
    assert seconds_per_rung(150) == pytest.approx(10) and seconds_per_rung(3600) == MAX_SECONDS


def test_the_quantiles_are_students():
    """Rounds of equal steps are told apart by peeking in about 2 % of the cases, not in 5."""
    source, wrong = np.random.default_rng(3), 0
    for _ in range(2000):
        ratios = np.exp(source.normal(0, 0.02, max(PEEKS)))
        wrong += any(student_ratio(ratios[:n]).excludes_one for n in PEEKS)
    assert 0.01 < wrong / 2000 < 0.03
    one, two = student_ratio([0.8, 0.82, 0.84]), student_ratio([0.8, 0.82, 0.84, 0.82])
    assert one.low < two.low < two.ratio < two.high < one.high


def test_two_live_workers_alternate(fated):
    first, second = alternate_specs(fated("live"), fated("live", batch=8), rounds=3, timeout=120)
    assert len(first) == len(second) == 3
    assert all(len(s) == 2 and min(s.values) > 0 for s in first + second)


@pytest.mark.slow
def test_a_worker_lost_in_a_comparison_is_one_sentence(fated):
    with pytest.raises(MeasurementError, match="SIGKILL"):
        alternate_specs(fated("live"), fated("die"), rounds=1, timeout=120)


def test_a_slow_step_of_a_round_keeps_what_was_seen_in_it():
    usual = Samples((30.0, 30.4, 30.0), "ms", {"1": "slow, garbage collection took 9.000 ms"})
    caught = Samples((30.0, 999.0, 30.0), "ms", {"1": "slow, captured the CUDA graph"})
    unknown = Samples((30.0, 30.0, 90.0), "ms")
    pooled = pool_rounds([usual, caught, usual, unknown])
    assert pooled.marks == {"4": "slow, captured the CUDA graph", "11": "slow, no cause seen"}
    assert pooled.outliers == (
        "outliers: 2 of 12 steps took far longer than 30.00 ms: "
        "999.0 ms (captured the CUDA graph), 90.00 ms (no cause seen)"
    )
