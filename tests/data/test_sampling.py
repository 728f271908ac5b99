"""The order of windows: permutations, and mixtures of sets."""

import numpy as np
import pytest

pytest.importorskip("hypothesis")
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from steplab.core.codec import decode, encode
from steplab.core.errors import UserError
from steplab.data.loader import Loader
from steplab.data.sampling import (
    ENDLESS,
    MixedOrder,
    MixedWindows,
    Order,
    Position,
    choose,
    mixed_paths,
    order_of,
    parse_shares,
)
from steplab.data.windows import Windows

from .stubs import ListSeries

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


QUICK = settings(max_examples=150)
PARTS = st.lists(st.integers(1, 60), min_size=2, max_size=6)


def numbered(first, count):
    """Windows whose first value tells their number."""
    return Windows(
        ListSeries([[first + i, 0] for i in range(count)], f"from {first}"), 2, 2, "none"
    )


def take(loader, batches):
    return [next(loader).values_BT[:, 0].int().tolist() for _ in range(batches)]


@given(PARTS, st.integers(0, 2**60), st.integers(1, 700))
@QUICK
def test_every_stretch_has_the_shares(parts, begin, length):
    members, _ = choose(np.arange(begin, begin + length), parts)
    for member, part in enumerate(parts):
        expected = Fraction(length * part, sum(parts))
        assert abs(int((members == member).sum()) - expected) < len(parts)


@given(PARTS, st.integers(1, 700))
@QUICK
def test_the_draws_of_every_set_are_counted_without_a_gap(parts, length):
    members, ranks = choose(np.arange(length), parts)
    for member in range(len(parts)):
        assert ranks[members == member].tolist() == list(range((members == member).sum()))


def test_two_sets_are_drawn_to_within_one():
    members, _ = choose(np.arange(100_000), (7, 3))
    counts = np.cumsum(members == 1)
    assert (np.abs(counts - 0.3 * np.arange(1, 100_001)) < 1).all()


@given(PARTS, st.lists(st.integers(1, 50), min_size=6, max_size=6), st.integers(0, 10**6))
@settings(QUICK, max_examples=50)
def test_every_pass_over_a_set_is_a_permutation_of_its_windows(parts, sizes, seed):
    sizes = sizes[: len(parts)]
    order = MixedOrder(sizes, parts, seed)
    drawn = order[np.arange(300)]
    starts = np.cumsum([0, *sizes])
    for member, size in enumerate(sizes):
        own = drawn[(drawn >= starts[member]) & (drawn < starts[member + 1])] - starts[member]
        for begin in range(0, len(own) - size + 1, size):
            assert sorted(own[begin : begin + size].tolist()) == list(range(size))


def test_passes_and_seeds_differ_and_an_index_decides():
    order = MixedOrder([40, 1000], (1, 1), 3)
    drawn = order[np.arange(400)]
    small = drawn[drawn < 40]
    assert small[:40].tolist() != small[40:80].tolist()
    assert MixedOrder([40, 1000], (1, 1), 4)[np.arange(400)].tolist() != drawn.tolist()
    assert [order[i] for i in range(60)] == drawn[:60].tolist()
    assert order[np.arange(123, 200)].tolist() == drawn[123:200].tolist()
    assert len(order) == ENDLESS and 0 <= order[ENDLESS - 1] < 1040
    for outside in (-1, ENDLESS):
        with pytest.raises(IndexError):
            order[outside]


@pytest.mark.parametrize(
    ("text", "parts"),
    [("0.7,0.3", (7, 3)), ("1, 2,3", (1, 2, 3)), ("1/3,2/3", (1, 2)), ("1e-3,1", (1, 1000))],
)
def test_shares_are_read_exactly(text, parts):
    assert parse_shares(text) == parts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0.7", "two or more shares"), ("0.7,0", "above 0"), ("0.7,-1", "above 0"),
        ("much,little", "not numbers"), ("1,,2", "not numbers"), ("nan,1", "not numbers"),
        ("1/0,1", "not numbers"), ("0.123456789012,1", "too fine"),
    ],
)  # fmt: skip
def test_wrong_shares(text, said):
    with pytest.raises(UserError, match=said):
        parse_shares(text)


def test_mixed_windows_read_what_their_sets_read():
    short = Windows(ListSeries([[1, 2, 3], [9]], "short"), 4, 4, "max")
    other = Windows(ListSeries([[2, 4], [8, 8], [5]], "other"), 4, 4, "none")
    mixed = MixedWindows([short, other], (1, 1))
    assert len(mixed) == 3 and mixed.length == 4 and mixed.series.name == "short + other"
    for number, (windows, own) in enumerate([(short, 0), (other, 0), (other, 1)]):
        for got, expected in zip(mixed.read(number), windows.read(own), strict=True):
            np.testing.assert_array_equal(got, expected)
    assert mixed.skipped["fewer than 2 points"] == 2
    with pytest.raises(IndexError):
        mixed.read(3)
    with pytest.raises(UserError, match="2 sets of series are mixed in 3 shares"):
        mixed_paths("a,b", (1, 1, 1))
    with pytest.raises(UserError, match="no epoch 2"):
        order_of(mixed, 0, 2)


@pytest.mark.parametrize("consumed", [0, 1, 7, 40])
def test_a_saved_position_continues_a_mixture_exactly(consumed):
    def mixture():
        return MixedWindows([numbered(0, 50), numbered(100, 3)], (9, 1))

    with Loader(mixture(), 8, 5, "cpu", workers=3) as whole:
        everything = take(whole, 60)
    with Loader(mixture(), 8, 5, "cpu") as first:
        head, position = take(first, consumed), first.position
    assert position == Position(0, 8 * consumed)
    with Loader(mixture(), 8, 5, "cpu", position, prefetch=1, workers=1) as second:
        assert head + take(second, 60 - consumed) == everything
    flat = np.concatenate(everything)
    assert (flat >= 100).sum() == 48  # a tenth of 480 draws: 16 passes over 3 windows
    assert sorted(flat[flat >= 100][:3].tolist()) == [100, 101, 102]


def test_a_batch_may_be_larger_than_a_set():
    with Loader(MixedWindows([numbered(0, 2), numbered(9, 1)], (1, 1)), 16, 0, "cpu") as loader:
        (batch,) = take(loader, 1)
    assert sorted(batch) == [0] * 4 + [1] * 4 + [9] * 8
