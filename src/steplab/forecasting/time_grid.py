"""Times on an even grid: missing rows become missing points, and forecasts continue the grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steplab.core.errors import UserError
from steplab.data.time_step import TimeStep, format_time, infer_time_step

Times = NDArray[Any]
Grid = TimeStep | str  # an inferred step, or a pandas frequency
IN_EVERY_MONTH = np.timedelta64(28, "D")  # every month has the days before that


def choose_grids(times: Sequence[Times], ids: Sequence[Any], freq: str | None) -> list[Grid]:
    """Return the grid of each series: `freq`, or inferred from its own times.

    A series of one point takes the step that all the others share.
    """
    if freq is not None:
        return [freq] * len(times)
    steps = [infer_time_step(one) for one in times]
    common = {step for step in steps if step is not None}
    for index, step in enumerate(steps):
        if step is not None:
            continue
        if len(times[index]) == 1 and len(common) == 1:
            steps[index] = next(iter(common))
        elif len(times[index]) == 1 and times[index].dtype.kind in "iu":
            steps[index] = TimeStep(1, "step")
        else:
            raise _uneven(times[index], ids[index])
    return [step for step in steps if step is not None]


def on_grid(
    times: Times, values: NDArray[np.float64], grid: Grid, max_points: int, name: Any
) -> NDArray[np.float64]:
    """Return the last `max_points` points on the grid; NaN where the series has no row."""
    if isinstance(grid, str):
        back = _back_by_freq(times, grid, max_points, name)
    else:
        steps = _steps(times, grid)
        back = steps[-1] - steps
    inside = back < max_points
    length = int(back[inside][0]) + 1
    found = np.full(length, np.nan)
    found[length - 1 - back[inside]] = values[inside]
    return found


def future_times(times: Times, grid: Grid, horizon: int) -> Times:
    """Return the `horizon` times that follow the last one, in the dtype of `times`."""
    last, ahead = times[-1], np.arange(1, horizon + 1)
    if isinstance(grid, str):
        import pandas as pd

        later = pd.date_range(last, periods=horizon + 1, freq=grid)[1:]
        return later.to_numpy().astype(times.dtype)
    if grid.unit == "ns":
        return last + ahead * _tick_step(times, grid)
    ahead = ahead * grid.count
    if grid.unit == "step":
        return last + ahead
    if grid.unit == "business day":
        day = last.astype("datetime64[D]")
        return (np.busday_offset(day, ahead) + (last - day)).astype(times.dtype)
    return _months_later(times, ahead).astype(times.dtype)


def _steps(times: Times, step: TimeStep) -> NDArray[np.int64]:
    """Return how many steps each time is after the first one."""
    if step.unit == "ns":
        return np.asarray((times - times[0]) // _tick_step(times, step), np.int64)
    elapsed: NDArray[Any]
    if step.unit == "month":
        months = times.astype("datetime64[M]").astype(np.int64)
        elapsed = months - months[0]
    elif step.unit == "business day":
        days = times.astype("datetime64[D]")
        elapsed = np.busday_count(days[0], days)
    else:
        elapsed = times - times[0]
    return np.asarray(elapsed // step.count, np.int64)


def _tick_step(times: Times, step: TimeStep) -> np.timedelta64:
    """Return a step in the unit of the times: in nanoseconds, 300 years would overflow."""
    unit, _ = np.datetime_data(times.dtype)
    found: np.timedelta64 = np.timedelta64(step.count, "ns").astype(f"timedelta64[{unit}]")
    return found


def _back_by_freq(times: Times, freq: str, max_points: int, name: Any) -> NDArray[np.int64]:
    """Return how many steps each time is before the last one; `max_points` if it is further."""
    import pandas as pd

    if times.dtype.kind != "M":
        raise UserError(f"The times of series {name!r} are counts, which have no frequency.")
    try:
        grid = pd.date_range(end=times[-1], periods=max_points, freq=freq)
    except ValueError:
        raise UserError(
            f"{freq!r} is not a pandas frequency.", "Example: h, D, W-SUN, MS, ME."
        ) from None
    steps = grid.get_indexer(pd.DatetimeIndex(times))
    off_grid = (steps < 0) & (times >= grid[0].to_numpy())
    if off_grid.any():
        first = format_time(times[int(np.argmax(off_grid))])
        raise UserError(f"Series {name!r} has a row at {first}, which is not on the grid {freq!r}.")
    return np.where(steps < 0, max_points, max_points - 1 - steps)


def _months_later(times: Times, ahead: NDArray[np.int64]) -> Times:
    """Return times at the same point of later months, counted from their start or their end."""
    months = times.astype("datetime64[M]")
    later = months[-1] + ahead
    from_start, past_end = times - months, (months + 1).astype("datetime64[D]")
    if (from_start == from_start[0]).all() and from_start[0] < IN_EVERY_MONTH:
        return later + from_start[-1]
    if (times - past_end == times[0] - past_end[0]).all():
        return (later + 1).astype("datetime64[D]") + (times[-1] - past_end[-1])
    # The 29th to the 31st: the last day of a shorter month.
    within = times[-1] - times[-1].astype("datetime64[D]")
    last_day = (later + 1).astype("datetime64[D]") - 1 + within
    return np.minimum(later + from_start[-1], last_day)


def _uneven(times: Times, name: Any) -> UserError:
    if len(times) == 1:
        problem = f"Series {name!r} has one row, so its step in time is unknown."
    else:
        problem = f"The times of series {name!r} have no even step."
    return UserError(
        problem, "Give its frequency (--freq, as in h, D, W-SUN, MS), or count rows in the column."
    )
