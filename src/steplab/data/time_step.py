"""The step between the points of a series, found in its times; and the rows that are missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Unit = Literal["step", "ns", "business day", "month"]
MIN_SHARE = 0.5  # of the differences must be the step itself; else there is no step
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
TICKS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}  # what pandas stores times in


@dataclass(frozen=True)
class TimeStep:
    """`count` of a unit; "step" where times are whole numbers."""

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
    """Return the step of sorted times [points], int64 or datetime64; None where there is none.

    The step is the most common difference, if every other difference is a multiple of it. Months
    are counted where all times fall on one day of the month, or on its last; business days where
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
    """Write a time as briefly as it can be: 2024-01-31, or 2024-01-31T13:00; a count as it is."""
    return (
        str(np.datetime_as_string(time, "auto")) if isinstance(time, np.datetime64) else str(time)
    )


def _most_common(differences: NDArray[np.int64]) -> int:
    """Return the most common difference, or 0 where it does not divide the others."""
    found, counts = np.unique(differences, return_counts=True)
    step = int(found[np.argmax(counts)])
    even = step > 0 and not (found % step).any()
    return step if even and counts.max() >= MIN_SHARE * len(differences) else 0


def _nanoseconds(times: NDArray[Any]) -> int:
    """Return the length of one tick of the times' own unit."""
    unit, count = np.datetime_data(times.dtype)
    return TICKS[unit] * count


def _months(times: NDArray[Any]) -> NDArray[np.int64] | None:
    """Return the months as numbers, if every time stands at the same place in its own month."""
    months = times.astype("datetime64[M]")
    if (np.diff(months).astype(np.int64) < 1).any():
        return None
    from_start = times - months
    from_end = times - (months + 1).astype("datetime64[D]")
    if (from_start == from_start[0]).all() or (from_end == from_end[0]).all():
        return months.astype(np.int64)
    return None


def _skips_weekends(times: NDArray[Any]) -> bool:
    """Whether a daily series crosses a weekend and none of its points lies on one."""
    days: NDArray[np.datetime64] = times.astype("datetime64[D]")
    weeks = (days.astype(np.int64) - FIRST_MONDAY) // 7
    return bool(np.is_busday(days).all() and weeks[-1] > weeks[0])
