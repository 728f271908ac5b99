"""The least change that a measurement could have seen."""

from __future__ import annotations

import math
from statistics import NormalDist

from steplab.compare.statistics import CONFIDENCE, RatioInterval

POWER = 0.8  # a change of the size returned is seen four times in five


def least_detectable(interval: RatioInterval) -> float:
    """Return the least relative change (0.02: two per cent) that this much spread lets be seen.

    The interval's width on a logarithmic scale gives the standard error of the ratio; a true
    change must stand off by z(confidence) + z(power) = 2.8 of those.
    """
    normal = NormalDist()
    sure = normal.inv_cdf((1 + CONFIDENCE) / 2)
    error = math.log(interval.high / interval.low) / (2 * sure)
    return math.expm1((sure + normal.inv_cdf(POWER)) * error)
