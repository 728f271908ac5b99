"""The period that is usual for a step in time, as GluonTS takes it."""

from __future__ import annotations

from steplab.data.time_step import NANOSECONDS, Step

# Steps per period: an hour of seconds, a day of minutes and of hours; days and weeks have none.
PER_PERIOD = {"second": 3600, "minute": 1440, "hour": 24}
MONTHS_PER_YEAR = 12
BUSINESS_DAYS_PER_WEEK = 5


def usual_period(step: Step | None) -> int:
    """Return the points per period for a step between points; 1 where there is no usual one."""
    if step is None:
        return 1
    if step.unit == "month":
        return _share(MONTHS_PER_YEAR, step.count)
    if step.unit == "business day":
        return _share(BUSINESS_DAYS_PER_WEEK, step.count)
    if step.unit == "ns":
        for name, steps in reversed(PER_PERIOD.items()):
            if step.count % NANOSECONDS[name] == 0:
                return _share(steps, step.count // NANOSECONDS[name])
    return 1


def _share(steps: int, count: int) -> int:
    """A quarter is 3 months: 4 of them make a year. What does not divide has no period."""
    return steps // count if steps % count == 0 else 1
