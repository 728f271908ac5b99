"""Realistic series from a seed: data to train on when there is none, and to judge models by.

Ten families, each a function that makes (values float64 [length], main period or None). They are
frozen, because models are judged on them: changing any number requires a new `VERSION`. For the
same reason their random numbers are the raw bits of PCG64 and arithmetic of our own: numpy keeps
the bits of PCG64 forever, but not what its distributions make of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from steplab.core.errors import UserError, did_you_mean
from steplab.data.series import check_range, to_float32

T = TypeVar("T")
RESOLUTION = 2.0**-53  # a float64 in [0, 1) holds 53 random bits


class StableRng:
    """A stream of random numbers that depends on a key of non-negative integers alone."""

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


Made = tuple[NDArray[np.float64], float | None]
SHORT_PERIODS = (7.0, 12.0, 24.0, 30.0, 48.0, 60.0)
NESTED_PERIODS = ((24.0, 168.0), (7.0, 364.0), (12.0, 144.0), (48.0, 336.0))
CALENDAR_PERIODS = (7.0, 12.0, 24.0)


def trend_seasonal(rng: StableRng, length: int) -> Made:
    """A bent trend, one or two seasonalities, and little noise."""
    t, period = np.arange(length), rng.choose(SHORT_PERIODS)
    values = rng.between(-20, 20) + _trend(rng, length)
    values = values + rng.between(1, 4) * _season(rng, t, period)
    if rng.between(0, 1) < 0.5:
        values = values + rng.between(0.3, 1) * _season(rng, t, period * rng.choose((3, 7)))
    return values + rng.between(0.05, 0.5) * rng.normals(length), period


def multi_seasonal(rng: StableRng, length: int) -> Made:
    """A short season inside a long one, whose height follows the long one; AR(1) noise."""
    t, (short, long) = np.arange(length), rng.choose(NESTED_PERIODS)
    slow = _season(rng, t, long)
    fast = _season(rng, t, short) * (1 + rng.between(0.1, 0.4) * slow)
    noise = _autoregress(rng.between(0.2, 0.7), rng.normals(length))
    values = rng.between(2, 4) * fast + rng.between(0.5, 1.8) * slow
    return rng.between(-20, 20) + values + rng.between(0.1, 0.4) * noise, short


def regime_change(rng: StableRng, length: int) -> Made:
    """Two to four pieces with a level, slope and period of their own. The last period counts."""
    cuts = np.sort(rng.uniforms(rng.choose((1, 2, 3)))) * length
    edges = [0, *cuts.astype(int).tolist(), length]
    values, level = np.zeros(length), rng.between(-10, 10)
    period = rng.choose(SHORT_PERIODS)
    for begin, end in pairwise(edges):
        t, slope = np.arange(end - begin), rng.between(-0.01, 0.01)
        season = rng.between(0.5, 3) * _season(rng, t, period)
        values[begin:end] = level + slope * t + season
        if end < length:
            level += slope * len(t) + rng.sign() * rng.between(2, 8)
            period = rng.choose(SHORT_PERIODS)
    return values + rng.between(0.1, 0.5) * rng.normals(length), period


def intermittent(rng: StableRng, length: int) -> Made:
    """Demand for a slow-moving part: zeros, and now and then a count; busier in the season."""
    t, period = np.arange(length), rng.choose(CALENDAR_PERIODS)
    often = rng.between(0.05, 0.3) * (1 + rng.between(0.5, 1) * _wave(rng, t, period))
    happens = rng.uniforms(length) < often
    more = np.log(1.0 - rng.uniforms(length)) / np.log(1.0 - rng.between(0.2, 0.6))
    return np.where(happens, 1 + np.floor(more), 0.0), period


def heteroscedastic(rng: StableRng, length: int) -> Made:
    """A wandering level whose noise comes in clusters: GARCH(1, 1) with unit mean variance."""
    shock_weight, memory = rng.between(0.05, 0.2), rng.between(0.6, 0.78)
    calm = 1 - shock_weight - memory
    variance, noise = 1.0, []
    for normal in rng.normals(length).tolist():
        noise.append(variance**0.5 * normal)
        variance = calm + variance * (memory + shock_weight * normal * normal)
    level = _autoregress(rng.between(0.9, 0.99), rng.normals(length))
    return rng.between(-10, 10) + rng.between(0.1, 0.5) * level + np.array(noise), None


def random_walk(rng: StableRng, length: int) -> Made:
    """A walk with drift: tomorrow is today and a step."""
    steps = rng.between(-0.05, 0.05) + rng.normals(length)
    return rng.between(-10, 10) + np.cumsum(steps), None


def autoregressive(rng: StableRng, length: int) -> Made:
    """An AR(2) process that oscillates with a period and forgets its phase."""
    period, damping = rng.between(6, 40), rng.between(0.9, 0.99)
    first = 2 * damping * float(np.cos(2 * np.pi / period))
    second, older, newer, values = -damping * damping, 0.0, 0.0, []
    for normal in rng.normals(length).tolist():
        older, newer = newer, first * newer + second * older + normal
        values.append(newer)
    return rng.between(-10, 10) + np.array(values), period


def chirp(rng: StableRng, length: int) -> Made:
    """A wave whose frequency grows threefold to sixfold; it has no one period."""
    share = np.arange(length) / length
    waves, growth = rng.between(5, 15), rng.between(3, 6)
    phase = waves * (share + 0.5 * (growth - 1) * share * share)
    values = np.sin(2 * np.pi * (phase + rng.between(0, 1)))
    return rng.between(1, 4) * values + 0.05 * rng.normals(length), None


def logistic_map(rng: StableRng, length: int) -> Made:
    """Chaos without noise: x' = r x (1 - x). Products only, so every machine makes the same."""
    rate, x = rng.between(3.7, 3.99), rng.between(0.2, 0.8)
    steps = accumulate(range(length - 1), lambda x, _: rate * (x * (1.0 - x)), initial=x)
    return np.array(list(steps)), None


def square_wave(rng: StableRng, length: int) -> Made:
    """Two levels with sharp edges, on for a part of every period."""
    period, on = rng.between(10, 80), rng.between(0.2, 0.8)
    phase = np.mod(np.arange(length) / period + rng.between(0, 1), 1.0)
    height = rng.between(1, 5)
    return np.where(phase < on, height, 0.0) + 0.05 * rng.normals(length), period


def _trend(rng: StableRng, length: int) -> NDArray[np.float64]:
    share = np.arange(length) / length
    bend = rng.between(0.1, 0.9)
    after = np.maximum(share - bend, 0.0)
    return rng.between(-10, 10) * share + rng.between(-10, 10) * after


def _wave(rng: StableRng, t: NDArray[np.int64], period: float) -> NDArray[np.float64]:
    return np.sin(2 * np.pi * (t / period + rng.between(0, 1)))


def _season(rng: StableRng, t: NDArray[np.int64], period: float) -> NDArray[np.float64]:
    """A wave with two weaker overtones: a repeated shape, not only a sine."""
    second, third = rng.between(0, 0.5), rng.between(0, 0.25)
    overtones = second * _wave(rng, t, period / 2) + third * _wave(rng, t, period / 3)
    return _wave(rng, t, period) + overtones


def _autoregress(memory: float, noise: NDArray[np.float64]) -> NDArray[np.float64]:
    """AR(1) with unit variance in the long run."""
    gain = (1 - memory * memory) ** 0.5
    return np.array(list(accumulate(noise.tolist(), lambda y, e: memory * y + gain * e)))


VERSION = 1  # part of every seed: another version makes other series
FAMILIES: dict[str, Callable[[StableRng, int], Made]] = {
    family.__name__: family
    for family in (
        trend_seasonal,
        multi_seasonal,
        regime_change,
        intermittent,
        heteroscedastic,
        random_walk,
        autoregressive,
        chirp,
        logistic_map,
        square_wave,
    )
}
# Never trained on: they are the out-of-distribution validation of a model.
HELD_OUT_FAMILIES = ("chirp", "logistic_map", "square_wave")
TRAIN_FAMILIES = tuple(name for name in FAMILIES if name not in HELD_OUT_FAMILIES)

CACHE_BYTES = 64 * 2**20  # the series read last are kept; making one takes about 1 ms


class SyntheticSeries:
    """`count` series of `length` points; series i depends on (seed, i) and its family.

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
        """The true main period of series `index` in points; None if it has none."""
        check_range(self.lengths, index, 0, 0)
        return self._make(index)[1]


def _make(
    seed: int, length: int, families: tuple[str, ...], index: int
) -> tuple[NDArray[np.float32], float | None]:
    family = families[index % len(families)]
    values, period = FAMILIES[family](StableRng(VERSION, seed, index), length)
    return to_float32(values), period
