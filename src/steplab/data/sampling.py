"""Which window comes next: a shuffle without memory, and mixtures of sets in fixed shares.

A shuffled list would cost 8 bytes per window, and resuming would have to make it again. Here the
order is a seeded permutation computed one position at a time.

In a mixture, the position of a run is one number, the draw: the set of draw g, and the window of
that set, are computed from g alone. Shares are not probabilities: any n consecutive draws hold n
times the share of every set, give or take less than the number of sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from steplab.core.errors import UserError
from steplab.data.series import JoinedSeries
from steplab.data.windows import WindowSet

MASK_64 = 2**64 - 1
ROUNDS = 6  # of the Feistel network: each half is mixed into the other three times
# Odd multipliers and shifts of the splitmix64 generator's output function.
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
GOLDEN = 0x9E3779B97F4A7C15
ENDLESS = 2**62  # draws; a mixture has one epoch
MAX_TOTAL = 2**31  # sum of the parts: products stay inside int64


@dataclass(frozen=True)
class Position:
    """How far a loader has come: the epoch, and how many of its windows were consumed."""

    epoch: int = 0
    index: int = 0


def order_of(windows: WindowSet, seed: int, epoch: int) -> Order | MixedOrder:
    """Return the order in which an epoch visits the windows; a mixture has one endless epoch."""
    if not isinstance(windows, MixedWindows):
        return Order(len(windows), seed, epoch)
    if epoch:
        raise UserError(
            f"A mixture has no epoch {epoch}.", "Resume with the shares of the first run."
        )
    return windows.order(seed)


class Order:
    """A permutation of range(n) that depends on (n, seed, epoch); `order[i]` is its i-th number.

    A Feistel network permutes the next power of two: numbers that fall outside range(n) go
    through it again until they fall inside (cycle walking, fewer than two passes on average).
    """

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        if n < 1:
            raise UserError(f"An order needs at least one number, not {n}.")
        self.n, self.seed, self.epoch = n, seed, epoch
        bits = max(2, (n - 1).bit_length())
        self._low_bits = np.uint64(bits // 2)
        self._low_mask = np.uint64((1 << (bits // 2)) - 1)
        self._high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        start = _mix_int(_mix_int(seed) + epoch)
        self._keys = [np.uint64(_mix_int(start + round_ * GOLDEN)) for round_ in range(ROUNDS)]

    def __len__(self) -> int:
        return self.n

    @overload
    def __getitem__(self, position: int) -> int: ...
    @overload
    def __getitem__(self, position: NDArray[np.int64]) -> NDArray[np.int64]: ...
    def __getitem__(self, position: int | NDArray[np.int64]) -> int | NDArray[np.int64]:
        """Return the number at a position, or the numbers at an array of positions."""
        positions = np.atleast_1d(np.asarray(position))
        if len(positions) and (positions.min() < 0 or positions.max() >= self.n):
            raise IndexError(f"position {position} of {self.n}")
        numbers = self._network(positions.astype(np.uint64))
        outside = np.flatnonzero(numbers >= self.n)
        while len(outside):
            numbers[outside] = self._network(numbers[outside])
            outside = outside[numbers[outside] >= self.n]
        found = numbers.astype(np.int64)
        return int(found[0]) if np.ndim(position) == 0 else found

    def _network(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        low, high = numbers & self._low_mask, numbers >> self._low_bits
        for round_ in range(0, ROUNDS, 2):
            low = low ^ (_mix(high + self._keys[round_]) & self._low_mask)
            high = high ^ (_mix(low + self._keys[round_ + 1]) & self._high_mask)
        return (high << self._low_bits) | low


class MixedWindows:
    """The windows of several sets, numbered one set after the other, drawn by `parts`."""

    def __init__(self, members: Sequence[WindowSet], parts: Sequence[int]) -> None:
        self.members, self.parts = tuple(members), tuple(parts)
        self.length = members[0].length
        sets = [member.series for member in members]
        self.series = JoinedSeries(" + ".join(each.name for each in sets), sets)
        self._ends = np.cumsum([len(member) for member in members])

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def skipped(self) -> dict[str, int]:
        """Series left out by reason, over all sets."""
        reasons = [reason for member in self.members for reason in member.skipped]
        return {
            reason: sum(member.skipped.get(reason, 0) for member in self.members)
            for reason in reasons
        }

    def order(self, seed: int) -> MixedOrder:
        """Return the order of the draws."""
        return MixedOrder([len(member) for member in self.members], self.parts, seed)

    def read(self, window: int) -> tuple[NDArray[Any], ...]:
        """Return window `window`, counted over all sets, as its own set reads it."""
        if not 0 <= window < len(self):
            raise IndexError(f"window {window} of {len(self)}")
        which = int(np.searchsorted(self._ends, window, side="right"))
        member = self.members[which]
        return member.read(window - int(self._ends[which]) + len(member))


class MixedOrder:
    """The windows of a mixture in the order in which they are drawn, without end.

    Every pass over a set is a permutation of its windows, a different one each time.
    """

    def __init__(self, sizes: Sequence[int], parts: Sequence[int], seed: int) -> None:
        self.epoch = 0
        self._sizes, self._parts, self._seed = tuple(sizes), tuple(parts), seed
        self._starts = np.cumsum([0, *sizes]).tolist()

    def __len__(self) -> int:
        return ENDLESS

    @overload
    def __getitem__(self, position: int) -> int: ...
    @overload
    def __getitem__(self, position: NDArray[np.int64]) -> NDArray[np.int64]: ...
    def __getitem__(self, position: int | NDArray[np.int64]) -> int | NDArray[np.int64]:
        """Return the window at a draw, or the windows at an array of draws."""
        draws = np.atleast_1d(np.asarray(position, np.int64))
        if len(draws) and (draws.min() < 0 or draws.max() >= ENDLESS):
            raise IndexError(f"draw {position} of {ENDLESS}")
        members, ranks = choose(draws, self._parts)
        found = np.empty(len(draws), np.int64)
        for member in np.unique(members).tolist():
            drawn = np.flatnonzero(members == member)
            found[drawn] = self._starts[member] + self._member_windows(member, ranks[drawn])
        return int(found[0]) if np.ndim(position) == 0 else found

    def _member_windows(self, member: int, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        passes, indices = np.divmod(ranks, self._sizes[member])
        numbers = np.empty(len(ranks), np.int64)
        for number in np.unique(passes).tolist():
            order = Order(self._sizes[member], self._seed + member, number)
            numbers[passes == number] = order[indices[passes == number]]
        return numbers


def choose(
    draws: NDArray[np.int64], parts: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (the set of every draw, how often that set was drawn before), both like `draws`.

    The first set takes its share of the draws, evenly spread; the second takes its share of the
    remaining draws; and so on.
    """
    members = np.full(len(draws), len(parts) - 1)
    ranks, left, free = draws.copy(), sum(parts), np.ones(len(draws), bool)
    for member, part in enumerate(parts[:-1]):
        before = _drawn_before(ranks, part, left)
        taken = free & (_drawn_before(ranks + 1, part, left) > before)
        members[taken] = member
        free &= ~taken
        ranks = np.where(taken, before, np.where(free, ranks - before, ranks))
        left -= part
    return members, ranks


def _drawn_before(draws: NDArray[np.int64], part: int, total: int) -> NDArray[np.int64]:
    """Return the nearest whole number to draws * part / total, in integers that cannot overflow."""
    rounds, rest = np.divmod(draws, total)
    return rounds * part + (rest * part + total // 2) // total


def parse_shares(text: str) -> tuple[int, ...]:
    """Read `0.7,0.3` as exact whole-number parts, here (7, 3); they need not add up to 1."""
    try:
        shares = [Fraction(word.strip()) for word in text.split(",")]
    except (ValueError, ZeroDivisionError):
        raise UserError(f"The shares {text!r} are not numbers.", "Write 0.7,0.3.") from None
    if len(shares) < 2 or min(shares) <= 0:
        raise UserError(
            f"A mixture has two or more shares above 0, not {text!r}.", "Write 0.7,0.3."
        )
    whole = lcm(*(share.denominator for share in shares))
    parts = [int(share * whole) for share in shares]
    if sum(parts) >= MAX_TOTAL:
        raise UserError(f"The shares {text!r} are too fine.", "Use fewer digits.")
    return tuple(parts)


def mixed_paths(text: str, parts: Sequence[int]) -> list[str]:
    """Read `a,b` as the paths of the sets, one for every part."""
    paths = [path for path in text.split(",") if path]
    if len(paths) != len(parts):
        raise UserError(
            f"{len(paths)} sets of series are mixed in {len(parts)} shares.",
            "Give as many paths as shares: --dataset-path a,b --mix 0.7,0.3",
        )
    return paths


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MULTIPLIERS[0])
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MULTIPLIERS[1])
    return x ^ (x >> np.uint64(31))


def _mix_int(x: int) -> int:
    x = (x + GOLDEN) & MASK_64
    x = ((x ^ (x >> 30)) * MULTIPLIERS[0]) & MASK_64
    x = ((x ^ (x >> 27)) * MULTIPLIERS[1]) & MASK_64
    return x ^ (x >> 31)
