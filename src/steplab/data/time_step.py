"""The time step between the points of a series, inferred from its times, and missing rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Unit = Literal["step", "ns", "business day", "month"]
MIN_SHARE = 0.5  # of the differences must equal the step; otherwise there is none
FIRST_MONDAY = 4  # days since 1970-01-01, a Thursday
NANOSECONDS = {
    "week": 604_800 * 10**9,
    "day": 86_400 * 10**9,
    "hour": 3_600 * 10**9,
    "minute": 60 * 10**9,
    "second": 10**9,
    "millisecond": 10**6,
    "microsecond": 10**3,
    "nanosecond": 1,
}
TICKS = {
    "s": 10**9,
    "ms": 10**6,
    "us": 10**3,
    "ns": 1,
}  # the units in which pandas stores times, in ns


@dataclass(frozen=True)
class TimeStep:
    """`count` of a unit; the unit is "step" if times are whole numbers."""

    count: int
    unit: Unit

    def __str__(self) -> str:
        count, unit = self.count, str(self.unit)
        if unit == "ns":
            unit = next(name for name, size in NANOSECONDS.items() if count % size == 0)
            count //= NANOSECONDS[unit]
        elif unit == "month" and count % 12 == 0:
            count, unit = count // 12, "year"
        return f"{count:,} {unit}{'s' if count != 1 else ''}"


def infer_time_step(times: NDArray[Any]) -> TimeStep | None:
    """Return the step of sorted times [points], int64 or datetime64; None if there is none.

    The step is the most common difference, if every other difference is a multiple of it. Months
    are counted if all times fall on the same day of the month, or on its last day; business days if
    a daily series has no weekends.
    """
    if len(times) < 2:
        return None
    if times.dtype.kind in "iu":
        count = _most_common(np.diff(times))
        return TimeStep(count, "step") if count else None
    months = _months(times)
    if months is not None:
        count = _most_common(np.diff(months))
        return TimeStep(count, "month") if count else None
    difference = _most_common(np.diff(times).astype(np.int64))
    count = difference * _nanoseconds(times)
    if not count:
        return None
    if count == NANOSECONDS["day"] and _skips_weekends(times):
        return TimeStep(1, "business day")
    return TimeStep(count, "ns")


def count_gaps(times: NDArray[Any], step: TimeStep) -> tuple[int, Any]:
    """Return (rows missing between the first and the last time, the time before the first gap)."""
    differences: NDArray[Any]
    if step.unit == "month":
        differences = np.diff(times.astype("datetime64[M]").astype(np.int64))
    elif step.unit == "business day":
        days = times.astype("datetime64[D]")
        differences = np.busday_count(days[:-1], days[1:])
    elif step.unit == "ns":
        differences = np.diff(times).astype(np.int64) * _nanoseconds(times)
    else:
        differences = np.diff(times)
    missing = differences // step.count - 1
    count = int(missing.sum())
    return count, times[int(np.argmax(missing > 0))] if count else None


def format_time(time: Any) -> str:
    """Format a time as briefly as possible: 2024-01-31, or 2024-01-31T13:00; a count as it is."""
    return (
        str(np.datetime_as_string(time, "auto")) if isinstance(time, np.datetime64) else str(time)
    )


def _most_common(differences: NDArray[np.int64]) -> int:
    """Return the most common difference, or 0 if it does not divide the others."""
    found, counts = np.unique(differences, return_counts=True)
    step = int(found[np.argmax(counts)])
    even = step > 0 and not (found % step).any()
    return step if even and counts.max() >= MIN_SHARE * len(differences) else 0


def _nanoseconds(times: NDArray[Any]) -> int:
    """Return how many nanoseconds one tick of the times' unit has."""
    unit, count = np.datetime_data(times.dtype)
    return TICKS[unit] * count


def _months(times: NDArray[Any]) -> NDArray[np.int64] | None:
    """Return the months as numbers if every time is at the same point of its month."""
    months = times.astype("datetime64[M]")
    if (np.diff(months).astype(np.int64) < 1).any():
        return None
    from_start = times - months
    from_end = times - (months + 1).astype("datetime64[D]")
    if (from_start == from_start[0]).all() or (from_end == from_end[0]).all():
        return months.astype(np.int64)
    return None


def _skips_weekends(times: NDArray[Any]) -> bool:
    """Return whether a daily series crosses a weekend without a point on it."""
    days: NDArray[np.datetime64] = times.astype("datetime64[D]")
    weeks = (days.astype(np.int64) - FIRST_MONDAY) // 7
    return bool(np.is_busday(days).all() and weeks[-1] > weeks[0])
