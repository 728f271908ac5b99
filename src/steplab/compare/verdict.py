"""Faster, slower or cannot tell: what an interval allows to be said."""

from __future__ import annotations

from steplab.compare.apart import LEAST_SAMPLES
from steplab.compare.detectable import least_detectable
from steplab.compare.statistics import CONFIDENCE, RatioInterval
from steplab.record.comparison import Change, Verdict
from steplab.units import percent


def change_of(interval: RatioInterval, samples: int) -> Change:
    """Turn the ratio of times B / A into a change; `samples` are those of the smaller side."""
    bounds = (interval.ratio - 1, interval.low - 1, interval.high - 1)
    detectable = least_detectable(interval) if samples >= LEAST_SAMPLES else None
    return Change(*bounds, CONFIDENCE, detectable)


def verdict_on(change: Change, samples: int, what: str) -> tuple[Verdict, str]:
    """Return the verdict on B with its sentence; `what` are the samples: "steps" or "rounds"."""
    if samples < LEAST_SAMPLES:
        few = f"an interval needs {LEAST_SAMPLES} {what} a side or more"
        return "cannot tell", f"{few}, and there are {samples}."
    sure = f"at {change.confidence * 100:.0f} % confidence"
    span = f"between {signed(change.low)} and {signed(change.high)} {sure}"
    if change.low > 0:
        return "slower", f"B takes {percent(change.value)} more time per step, {span}."
    if change.high < 0:
        return "faster", f"B takes {percent(-change.value)} less time per step, {span}."
    return "cannot tell", f"the change in time per step lies {span}, zero included."


def slower_than(change: Change, limit: float) -> bool:
    """Whether B is slower than A by more than `limit` (0.03: 3 %), the whole interval long."""
    return change.detectable is not None and change.low > limit


def signed(fraction: float) -> str:
    """Format a relative change with its sign, as in `+3.2 %`."""
    return f"{fraction * 100:+.1f} %"
