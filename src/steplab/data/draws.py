"""Random numbers that stay the same: the raw bits of PCG64 and our own arithmetic on them.

numpy keeps the bits of PCG64 for ever, but not what its distributions make of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
RESOLUTION = 2.0**-53  # a float64 in [0, 1) holds 53 random bits


class Draws:
    """A stream of random numbers, decided by a few whole numbers that are not negative."""

    def __init__(self, *key: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence(key))

    def uniforms(self, count: int) -> NDArray[np.float64]:
        """Return numbers in [0, 1), shape [count]."""
        raw = np.atleast_1d(self._bits.random_raw(count))
        return (raw >> np.uint64(11)).astype(np.float64) * RESOLUTION

    def normals(self, count: int) -> NDArray[np.float64]:
        """Return standard normal numbers, shape [count] (Box-Muller, the cosine half)."""
        radius = np.sqrt(-2.0 * np.log(1.0 - self.uniforms(count)))
        return radius * np.cos(2.0 * np.pi * self.uniforms(count))

    def between(self, low: float, high: float) -> float:
        """Return one number in [low, high)."""
        return low + (high - low) * float(self.uniforms(1)[0])

    def sign(self) -> float:
        """Return -1 or 1."""
        return self.choose((-1.0, 1.0))

    def choose(self, options: Sequence[T]) -> T:
        """Return one of the options, all equally likely."""
        return options[int(self.between(0, len(options)))]
