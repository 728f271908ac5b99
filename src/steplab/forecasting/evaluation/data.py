"""What a model is evaluated on: series, the group each belongs to, and its period."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from steplab.core.errors import UserError
from steplab.data.formats import open_series
from steplab.data.formats.frames import READERS, FrameSeries, read_frame
from steplab.data.series import JoinedSeries, SeriesSet
from steplab.data.synthetic import FAMILIES, HELD_OUT_FAMILIES, SyntheticSeries
from steplab.data.time_step import NANOSECONDS, TimeStep, infer_time_step

# Generated for evaluation alone: `steplab train` makes none of them unless this is its --seed.
EVALUATION_SEED = 3_000_003
# As long as the series that are trained on by default (1,028 points): families depend on it.
SERIES_PER_FAMILY, LENGTH = 40, 1024
NO_PERIOD = "the period 1, because none was given"
# Steps per period, as GluonTS has it: an hour of seconds, a day of minutes or of hours.
STEPS_PER_PERIOD = {"second": 3600, "minute": 1440, "hour": 24}
MONTHS_PER_YEAR = 12
BUSINESS_DAYS_PER_WEEK = 5


@dataclass(frozen=True)
class EvaluationData:
    """Series with what is known about them."""

    series: SeriesSet
    group: Callable[[int], str]  # of a series, by its number
    period: Callable[[int], int]  # in points; 1 if a series has none
    period_text: str  # which periods these are, in words
    unseen: frozenset[str] = frozenset()  # groups of a kind that is never trained on
    notes: tuple[str, ...] = ()  # what a user should know about the data


def generated_data(period: int | None = None) -> EvaluationData:
    """Return generated series of all families, held out from training."""
    count = SERIES_PER_FAMILY * len(FAMILIES)
    series = SyntheticSeries(count, LENGTH, EVALUATION_SEED, tuple(FAMILIES))
    unseen = frozenset(HELD_OUT_FAMILIES)
    if period is not None:
        return EvaluationData(
            series, series.family, lambda _: period, _given_period(period), unseen
        )

    def true_period(index: int) -> int:
        return max(1, round(series.period(index) or 1))

    text = "the true period of every series, to the nearest point (1 if there is none)"
    return EvaluationData(series, series.family, true_period, text, unseen)


def open_data(path: Path, period: int | None = None) -> EvaluationData:
    """Return the series of a file or folder; each dataset in a folder is a group."""
    if path.suffix.lower() in READERS and path.is_file():
        return _frame_data(path, period)
    series = open_series(path)
    group = _group_by_member(series) if isinstance(series, JoinedSeries) else lambda _: path.name
    if period is None:
        return EvaluationData(series, group, lambda _: 1, NO_PERIOD)
    return EvaluationData(series, group, lambda _: period, _given_period(period))


def check_period(period: int | None) -> None:
    """Refuse a period below 1."""
    if period is not None and period < 1:
        raise UserError(f"--period must be at least 1 point, not {period}.")


def usual_period(step: TimeStep | None) -> int:
    """Return the points per period that are usual for a time step; 1 if there is no such period."""
    if step is None:
        return 1
    if step.unit == "month":
        return _steps_per_period(MONTHS_PER_YEAR, step.count)
    if step.unit == "business day":
        return _steps_per_period(BUSINESS_DAYS_PER_WEEK, step.count)
    if step.unit == "ns":
        for name, steps in reversed(STEPS_PER_PERIOD.items()):
            if step.count % NANOSECONDS[name] == 0:
                return _steps_per_period(steps, step.count // NANOSECONDS[name])
    return 1


def _steps_per_period(steps: int, count: int) -> int:
    """Return how many times `count` steps fit: 4 quarters of 3 months; 1 if it does not divide."""
    return steps // count if steps % count == 0 else 1


def _frame_data(path: Path, period: int | None) -> EvaluationData:
    frame = read_frame(path)
    series, name = FrameSeries(frame), path.name
    if period is not None:
        given = _given_period(period)
        return EvaluationData(series, lambda _: name, lambda _: period, given, notes=frame.notes)
    steps = [infer_time_step(times) for times in frame.timestamps]
    periods = [usual_period(step) for step in steps]
    found = ", ".join(
        sorted({f"{p} for {s or 'no one step'}" for p, s in zip(periods, steps, strict=True)})
    )
    text = f"the usual period of each series' step ({found})"
    return EvaluationData(series, lambda _: name, periods.__getitem__, text, notes=frame.notes)


def _given_period(period: int) -> str:
    return f"the period {period}, as given"


def _group_by_member(series: JoinedSeries) -> Callable[[int], str]:
    names = [member.name for member in series.members for _ in range(len(member))]
    return names.__getitem__
