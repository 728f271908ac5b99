"""Intervals and fits over samples, in plain Python: a few dozen values need no more."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

RESAMPLES = 4000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class RatioInterval:
    """The ratio of two medians with its bootstrap interval at CONFIDENCE."""

    ratio: float
    low: float
    high: float

    @property
    def excludes_one(self) -> bool:
        """Whether the difference is real at this confidence."""
        return self.low > 1 or self.high < 1


def round_ratio(
    numerators: Sequence[Sequence[float]], denominators: Sequence[Sequence[float]]
) -> RatioInterval:
    """Return the ratio of medians of two specs measured in turns, with its interval.

    Whole rounds are drawn, not single steps: steps of one round share the machine's mood, and
    taken as independent they would make the interval too narrow.
    """
    source = random.Random(0)
    rounds = len(numerators)

    def ratio(chosen: Sequence[int]) -> float:
        pooled = ([v for i in chosen for v in side[i]] for side in (numerators, denominators))
        top, bottom = (statistics.median(values) for values in pooled)
        return top / bottom

    ratios = sorted(ratio(source.choices(range(rounds), k=rounds)) for _ in range(RESAMPLES))
    tail = (1 - CONFIDENCE) / 2
    low, high = ratios[int(tail * RESAMPLES)], ratios[math.ceil((1 - tail) * RESAMPLES) - 1]
    return RatioInterval(ratio(range(rounds)), low, high)


def local_exponent(x0: float, y0: float, x1: float, y1: float) -> float:
    """Return p in y ~ x^p between two points."""
    return math.log(y1 / y0) / math.log(x1 / x0)


def line_fit(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Return (intercept, slope) of the least-squares line through the points."""
    fit = statistics.linear_regression(xs, ys)
    return fit.intercept, fit.slope
