from fractions import Fraction

import numpy as np
import pytest

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

from steplab.core.errors import UserError
from steplab.data.loader import Loader
from steplab.data.mixture import (
    ENDLESS,
    MixedOrder,
    MixedWindows,
    choose,
    mixed_paths,
    order_of,
    parse_shares,
)
from steplab.data.order import Position
from steplab.data.windows import Windows

from .stubs import ListSeries

QUICK = settings(max_examples=150, deadline=None, derandomize=True)
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
