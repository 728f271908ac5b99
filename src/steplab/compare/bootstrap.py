"""Ratios of step times with bootstrap intervals, and what an interval allows to be said."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from steplab.core.comparison import Change, Verdict
from steplab.core.units import percent

CONFIDENCE = 0.95
RESAMPLES = 4000
MAX_DRAWN = 4_000_000  # indices held at once, 32 MB
# The smallest and largest of 6 values hold the true median between them with probability 97 %, of
# 5 values with 94 %: fewer than 6 cannot give an interval at 95 %.
MIN_SAMPLES = 6
POWER = 0.8  # a change of the least detectable size is seen four times in five


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


def ratio_of_rounds(
    numerators: Sequence[Sequence[float]], denominators: Sequence[Sequence[float]]
) -> RatioInterval:
    """Return the ratio of medians of two specs measured in turns, with its interval.

    Whole rounds are drawn, not single steps: steps of one round share clocks, temperature and
    load of the machine, and taken as independent they would make the interval too narrow.
    """
    rng = random.Random(0)
    rounds = len(numerators)

    def ratio(chosen: Sequence[int]) -> float:
        pooled = ([v for i in chosen for v in side[i]] for side in (numerators, denominators))
        top, bottom = (statistics.median_low(values) for values in pooled)
        return top / bottom

    ratios = sorted(ratio(rng.choices(range(rounds), k=rounds)) for _ in range(RESAMPLES))
    tail = (1 - CONFIDENCE) / 2
    low, high = ratios[int(tail * RESAMPLES)], ratios[math.ceil((1 - tail) * RESAMPLES) - 1]
    return RatioInterval(ratio(range(rounds)), low, high)


def ratio_of_samples(numerator: Sequence[float], denominator: Sequence[float]) -> RatioInterval:
    """Return the ratio of medians of two series measured one after the other, with its interval.

    Blocks of neighboring samples are drawn, sqrt(n) long: steps that follow each other are not
    independent. In 300 trials each with equal distributions, n = 6 to 200, the interval missed 1
    in 3 to 4 % of the cases, and in 4 to 16 % where neighbors correlated by 0.5. No resampling
    can know what changed on the machine between the two series.
    """
    rng = np.random.default_rng(0)
    series = [np.asarray(values, dtype=np.float64) for values in (numerator, denominator)]
    top, bottom = (_resampled_medians(values, rng) for values in series)
    tail = _tail(min(_blocks(len(values))[1] for values in series))
    low, high = np.quantile(top / bottom, [tail, 1 - tail], method="inverted_cdf")
    ratio = statistics.median_low(numerator) / statistics.median_low(denominator)
    return RatioInterval(ratio, float(low), float(high))


def _blocks(count: int) -> tuple[int, int]:
    """Length and number of the blocks that a series of `count` samples is made of."""
    length = max(1, round(math.sqrt(count)))
    return length, math.ceil(count / length)


def _resampled_medians(
    series: NDArray[np.float64], rng: np.random.Generator
) -> NDArray[np.float64]:
    """Medians of RESAMPLES series, each made of blocks of this one; a block may wrap around."""
    count = len(series)
    length, blocks = _blocks(count)
    at_once = max(1, MAX_DRAWN // (blocks * length))
    medians = []
    for begin in range(0, RESAMPLES, at_once):
        draws = min(at_once, RESAMPLES - begin)
        starts = rng.integers(count, size=(draws, blocks, 1))
        chosen = (starts + np.arange(length)) % count
        drawn = series[chosen.reshape(draws, -1)[:, :count]]
        medians.append(np.quantile(drawn, 0.5, axis=1, method="lower"))
    return np.concatenate(medians)


def _tail(blocks: int) -> float:
    """The share of resamples to leave out at each end.

    Resamples of few blocks spread too little. Hesterberg's expanded percentiles (2015) correct
    that: Student's quantile for the blocks of both series in place of the normal one, and
    sqrt(k / (k - 1)) for the variance.
    """
    if blocks < 2:
        return 0.0
    student = student_quantile(2 * blocks - 2)
    return NormalDist().cdf(-student * math.sqrt(blocks / (blocks - 1)))


@lru_cache(maxsize=256)
def student_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """Return t such that Student's variable lies within -t and t with this probability."""
    low, high = 0.0, 1e3
    while high - low > 1e-9:
        middle = (low + high) / 2
        if _within(middle, freedom) < confidence:
            low = middle
        else:
            high = middle
    return high


def _within(t: float, freedom: int) -> float:
    """Return the probability of |T| < t: for whole degrees of freedom a finite sum of cosines."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= math.cos(angle) ** 2 * k / (k + 1)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


def least_detectable(interval: RatioInterval) -> float:
    """Return the smallest relative change (0.02: two percent) that this spread lets us see.

    The interval's width on a logarithmic scale gives the standard error of the ratio; a true
    change must exceed z(confidence) + z(power) = 2.8 of those.
    """
    normal = NormalDist()
    sure = normal.inv_cdf((1 + CONFIDENCE) / 2)
    error = math.log(interval.high / interval.low) / (2 * sure)
    return math.expm1((sure + normal.inv_cdf(POWER)) * error)


def change_of(interval: RatioInterval, samples: int) -> Change:
    """Turn the ratio of times B / A into a change; `samples` are those of the smaller side."""
    return Change(
        value=interval.ratio - 1,
        low=interval.low - 1,
        high=interval.high - 1,
        confidence=CONFIDENCE,
        detectable=least_detectable(interval) if samples >= MIN_SAMPLES else None,
    )


def verdict_on(change: Change, samples: int, what: str) -> tuple[Verdict, str]:
    """Return the verdict on B with its sentence; `what` are the samples: "steps" or "rounds"."""
    if samples < MIN_SAMPLES:
        few = f"an interval needs {MIN_SAMPLES} {what} a side or more"
        return "cannot tell", f"{few}, and there are {samples}."
    sure = f"at {change.confidence * 100:.0f} % confidence"
    span = f"between {signed(change.low)} and {signed(change.high)} {sure}"
    if change.low > 0:
        return "slower", f"B takes {percent(change.value)} more time per step, {span}."
    if change.high < 0:
        return "faster", f"B takes {percent(-change.value)} less time per step, {span}."
    return "cannot tell", f"the change in time per step lies {span}, zero included."


def slower_than(change: Change, limit: float) -> bool:
    """Whether the whole interval says that B is slower than A by more than `limit` (0.03: 3 %)."""
    return change.detectable is not None and change.low > limit


def signed(fraction: float) -> str:
    """Format a relative change with its sign, as in `+3.2 %`."""
    return f"{fraction * 100:+.1f} %"
