"""Realistic series from a seed: data for training when there is none, frozen by `VERSION`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from steplab.data import families as made_by
from steplab.data.draws import Draws
from steplab.data.families import Made
from steplab.data.points import check_range, to_float32
from steplab.errors import UserError, did_you_mean

VERSION = 1  # a part of every seed: another version makes other series
FAMILIES: dict[str, Callable[[Draws, int], Made]] = {
    family.__name__: family
    for family in (
        made_by.trend_seasonal,
        made_by.multi_seasonal,
        made_by.regime_change,
        made_by.intermittent,
        made_by.heteroscedastic,
        made_by.random_walk,
        made_by.autoregressive,
        made_by.chirp,
        made_by.logistic_map,
        made_by.square_wave,
    )
}
# Never trained on: how a model does on these is its out-of-distribution validation.
HELD_OUT_FAMILIES = ("chirp", "logistic_map", "square_wave")
TRAIN_FAMILIES = tuple(name for name in FAMILIES if name not in HELD_OUT_FAMILIES)

CACHE_BYTES = 64 * 2**20  # the series touched last stay; making one takes about 1 ms


class SyntheticSeries:
    """`count` series of `length` points; series i is decided by (seed, i) and its family.

    The families take turns: series i belongs to families[i % len(families)].
    """

    def __init__(
        self, count: int, length: int, seed: int, families: Sequence[str] = TRAIN_FAMILIES
    ) -> None:
        if count < 1 or length < 1 or seed < 0 or not families:
            raise UserError(
                f"{count} synthetic series of {length} points with seed {seed} from "
                f"{len(families)} families cannot be made.",
                "Give at least 1 series, 1 point and 1 family, and a seed that is not negative.",
            )
        for family in families:
            if family not in FAMILIES:
                raise UserError(
                    f"There is no family of series called {family!r}.",
                    did_you_mean(family, FAMILIES),
                )
        self.name = f"synthetic-v{VERSION} (seed {seed})"
        self.lengths = np.full(count, length, np.int64)
        self._families = tuple(families)
        kept = max(16, CACHE_BYTES // (4 * length))
        self._make = lru_cache(kept)(partial(_make, seed, length, self._families))

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, index: int, start: int, stop: int) -> NDArray[np.float32]:
        """Return points [start, stop) of series `index`."""
        check_range(self.lengths, index, start, stop)
        return self._make(index)[0][start:stop].copy()

    def family(self, index: int) -> str:
        """The name of the family that series `index` belongs to."""
        check_range(self.lengths, index, 0, 0)
        return self._families[index % len(self._families)]

    def period(self, index: int) -> float | None:
        """The true main period of series `index` in points; None where it has none."""
        check_range(self.lengths, index, 0, 0)
        return self._make(index)[1]


def _make(
    seed: int, length: int, families: tuple[str, ...], index: int
) -> tuple[NDArray[np.float32], float | None]:
    family = families[index % len(families)]
    values, period = FAMILIES[family](Draws(VERSION, seed, index), length)
    return to_float32(values), period
