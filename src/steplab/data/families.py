"""Families of synthetic series. Each makes (values float64 [length], main period or None).

Frozen: models are judged on them. A change of any number is a new `VERSION` in synthetic.py.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from steplab.data.draws import Draws

Made = tuple[NDArray[np.float64], float | None]
SHORT_PERIODS = (7.0, 12.0, 24.0, 30.0, 48.0, 60.0)
NESTED_PERIODS = ((24.0, 168.0), (7.0, 364.0), (12.0, 144.0), (48.0, 336.0))
CALENDAR_PERIODS = (7.0, 12.0, 24.0)


def trend_seasonal(draws: Draws, length: int) -> Made:
    """A bent trend, one or two seasonalities, and little noise."""
    t, period = np.arange(length), draws.choose(SHORT_PERIODS)
    values = draws.between(-20, 20) + _trend(draws, length)
    values = values + draws.between(1, 4) * _season(draws, t, period)
    if draws.between(0, 1) < 0.5:
        values = values + draws.between(0.3, 1) * _season(draws, t, period * draws.choose((3, 7)))
    return values + draws.between(0.05, 0.5) * draws.normals(length), period


def multi_seasonal(draws: Draws, length: int) -> Made:
    """A short season inside a long one, whose height follows the long one; AR(1) noise."""
    t, (short, long) = np.arange(length), draws.choose(NESTED_PERIODS)
    slow = _season(draws, t, long)
    fast = _season(draws, t, short) * (1 + draws.between(0.1, 0.4) * slow)
    noise = _autoregress(draws.between(0.2, 0.7), draws.normals(length))
    values = draws.between(2, 4) * fast + draws.between(0.5, 1.8) * slow
    return draws.between(-20, 20) + values + draws.between(0.1, 0.4) * noise, short


def regime_change(draws: Draws, length: int) -> Made:
    """Two to four pieces with a level, slope and period of their own. The last period counts."""
    cuts = np.sort(draws.uniforms(draws.choose((1, 2, 3)))) * length
    edges = [0, *cuts.astype(int).tolist(), length]
    values, level = np.zeros(length), draws.between(-10, 10)
    period = draws.choose(SHORT_PERIODS)
    for begin, end in pairwise(edges):
        t, slope = np.arange(end - begin), draws.between(-0.01, 0.01)
        season = draws.between(0.5, 3) * _season(draws, t, period)
        values[begin:end] = level + slope * t + season
        if end < length:
            level += slope * len(t) + draws.sign() * draws.between(2, 8)
            period = draws.choose(SHORT_PERIODS)
    return values + draws.between(0.1, 0.5) * draws.normals(length), period


def intermittent(draws: Draws, length: int) -> Made:
    """Demand for a slow-moving part: zeros, and now and then a count; busier in the season."""
    t, period = np.arange(length), draws.choose(CALENDAR_PERIODS)
    often = draws.between(0.05, 0.3) * (1 + draws.between(0.5, 1) * _wave(draws, t, period))
    happens = draws.uniforms(length) < often
    more = np.log(1.0 - draws.uniforms(length)) / np.log(1.0 - draws.between(0.2, 0.6))
    return np.where(happens, 1 + np.floor(more), 0.0), period


def heteroscedastic(draws: Draws, length: int) -> Made:
    """A wandering level whose noise comes in clusters: GARCH(1, 1) with unit mean variance."""
    shock_weight, memory = draws.between(0.05, 0.2), draws.between(0.6, 0.78)
    calm = 1 - shock_weight - memory
    variance, noise = 1.0, []
    for normal in draws.normals(length).tolist():
        noise.append(variance**0.5 * normal)
        variance = calm + variance * (memory + shock_weight * normal * normal)
    level = _autoregress(draws.between(0.9, 0.99), draws.normals(length))
    return draws.between(-10, 10) + draws.between(0.1, 0.5) * level + np.array(noise), None


def random_walk(draws: Draws, length: int) -> Made:
    """A walk with drift: tomorrow is today and a step."""
    steps = draws.between(-0.05, 0.05) + draws.normals(length)
    return draws.between(-10, 10) + np.cumsum(steps), None


def autoregressive(draws: Draws, length: int) -> Made:
    """An AR(2) process that swings with a period of its own and forgets its phase."""
    period, damping = draws.between(6, 40), draws.between(0.9, 0.99)
    first = 2 * damping * float(np.cos(2 * np.pi / period))
    second, older, newer, values = -damping * damping, 0.0, 0.0, []
    for normal in draws.normals(length).tolist():
        older, newer = newer, first * newer + second * older + normal
        values.append(newer)
    return draws.between(-10, 10) + np.array(values), period


def chirp(draws: Draws, length: int) -> Made:
    """A wave whose frequency grows threefold to sixfold; it has no one period."""
    share = np.arange(length) / length
    waves, growth = draws.between(5, 15), draws.between(3, 6)
    phase = waves * (share + 0.5 * (growth - 1) * share * share)
    values = np.sin(2 * np.pi * (phase + draws.between(0, 1)))
    return draws.between(1, 4) * values + 0.05 * draws.normals(length), None


def logistic_map(draws: Draws, length: int) -> Made:
    """Chaos without noise: x' = r x (1 - x). Products only, so every machine makes the same."""
    rate, x = draws.between(3.7, 3.99), draws.between(0.2, 0.8)
    steps = accumulate(range(length - 1), lambda x, _: rate * (x * (1.0 - x)), initial=x)
    return np.array(list(steps)), None


def square_wave(draws: Draws, length: int) -> Made:
    """Two levels with sharp edges, on for a part of every period."""
    period, on = draws.between(10, 80), draws.between(0.2, 0.8)
    place = np.mod(np.arange(length) / period + draws.between(0, 1), 1.0)
    height = draws.between(1, 5)
    return np.where(place < on, height, 0.0) + 0.05 * draws.normals(length), period


def _trend(draws: Draws, length: int) -> NDArray[np.float64]:
    share = np.arange(length) / length
    bend = draws.between(0.1, 0.9)
    after = np.maximum(share - bend, 0.0)
    return draws.between(-10, 10) * share + draws.between(-10, 10) * after


def _wave(draws: Draws, t: NDArray[np.int64], period: float) -> NDArray[np.float64]:
    return np.sin(2 * np.pi * (t / period + draws.between(0, 1)))


def _season(draws: Draws, t: NDArray[np.int64], period: float) -> NDArray[np.float64]:
    """A wave with two weaker overtones: a repeated shape, not only a sine."""
    second, third = draws.between(0, 0.5), draws.between(0, 0.25)
    overtones = second * _wave(draws, t, period / 2) + third * _wave(draws, t, period / 3)
    return _wave(draws, t, period) + overtones


def _autoregress(memory: float, noise: NDArray[np.float64]) -> NDArray[np.float64]:
    """AR(1) with unit variance in the long run."""
    gain = (1 - memory * memory) ** 0.5
    return np.array(list(accumulate(noise.tolist(), lambda y, e: memory * y + gain * e)))
