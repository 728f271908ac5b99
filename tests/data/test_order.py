import numpy as np
import pytest

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

from steplab.core.codec import decode, encode
from steplab.core.errors import UserError
from steplab.data.order import Order, Position

GOLDEN = [416, 709, 630, 107, 173, 480]
ANY_SEED = st.integers(-(2**70), 2**70)


@given(st.integers(1, 3000), ANY_SEED, st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_a_bijection(n, seed, epoch):
    numbers = Order(n, seed, epoch)[np.arange(n)]
    assert sorted(numbers.tolist()) == list(range(n))


@pytest.mark.parametrize("bits", range(1, 17))
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_a_bijection_around_powers_of_two(bits, off):
    n = max(1, 2**bits + off)
    assert len(np.unique(Order(n, 7, 0)[np.arange(n)])) == n


@given(st.integers(1, 2**62), ANY_SEED, st.data())
@settings(max_examples=50, deadline=None)
def test_one_position_equals_many(n, seed, data):
    order = Order(n, seed, 3)
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=8))
    numbers = order[np.array(positions)]
    assert numbers.tolist() == [order[p] for p in positions]
    assert all(0 <= number < n for number in numbers.tolist())
    assert len(set(positions)) == len(set(numbers.tolist()))


def test_seeds_and_epochs_give_unrelated_orders():
    orders = [Order(10_000, s, e)[np.arange(10_000)] for s in (0, 1) for e in (0, 1)]
    for i, a in enumerate(orders):
        for b in [np.arange(10_000), *orders[:i]]:
            assert abs(np.corrcoef(a, b)[0, 1]) < 0.05
            assert (a == b).sum() < 15  # about 1 by chance


def test_every_number_is_about_equally_likely_at_every_place():
    counts = np.zeros((5, 5))
    for seed in range(2000):
        counts[np.arange(5), Order(5, seed, 0)[np.arange(5)]] += 1
    assert np.abs(counts / 2000 - 0.2).max() < 0.06


def test_the_order_stays_what_it_is():
    """A resumed run depends on it."""
    assert Order(1000, 42, 3)[np.arange(6)].tolist() == GOLDEN
    assert Order(1000, 42, 3)[5] == GOLDEN[5]


def test_outside_and_empty():
    for position in (-1, 10):
        with pytest.raises(IndexError):
            Order(10, 0, 0)[position]
    with pytest.raises(UserError, match="at least one"):
        Order(0, 0, 0)
    assert len(Order(10, 0, 0)[np.arange(0)]) == 0


def test_a_position_travels_as_json():
    position = Position(3, 4096)
    assert decode(Position, encode(position)) == position
