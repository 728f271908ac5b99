"""A shuffle without memory: a seeded permutation computed one position at a time.

A shuffled list would cost 8 bytes per window, and resuming would have to make it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from steplab.core.errors import UserError

MASK_64 = 2**64 - 1
ROUNDS = 6  # of the Feistel network: each half is mixed into the other three times
# Odd multipliers and shifts of the splitmix64 generator's output function.
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Position:
    """How far a loader has come: the epoch, and how many of its windows were consumed."""

    epoch: int = 0
    index: int = 0


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


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MULTIPLIERS[0])
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MULTIPLIERS[1])
    return x ^ (x >> np.uint64(31))


def _mix_int(x: int) -> int:
    x = (x + GOLDEN) & MASK_64
    x = ((x ^ (x >> 30)) * MULTIPLIERS[0]) & MASK_64
    x = ((x ^ (x >> 27)) * MULTIPLIERS[1]) & MASK_64
    return x ^ (x >> 31)
