"""Samples: every value that was measured, and the views of it. Nothing is ever dropped."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from steplab.core import units

# A value further than this many median absolute deviations above the median is marked.
# 8 MADs is 5.4 standard deviations of a normal: one false mark in 10 million samples.
SLOW_IN_MADS = 8.0
SLOW = "slow, no cause seen"
# Marked values are told from this many medians on: a step that is a tenth slower is no surprise.
OUTLIER = 1.5
SHOWN_OUTLIERS = 3


@dataclass(frozen=True)
class Samples:
    """Raw values with their unit. `marks` gives the reason why a value (by index) is suspect."""

    values: tuple[float, ...]
    unit: str
    marks: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def median(self) -> float:
        """The middle value, the lower of two, so that some step had it; NaN when there are none."""
        return statistics.median_low(self.values) if self.values else float("nan")

    @property
    def mean(self) -> float:
        """The arithmetic mean; NaN when there are no values."""
        return statistics.fmean(self.values) if self.values else float("nan")

    @property
    def std(self) -> float:
        """The sample standard deviation (n - 1 in the denominator); 0 for a single value."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    @property
    def cv(self) -> float:
        """The coefficient of variation, std / mean."""
        return self.std / self.mean if self.values and self.mean else float("nan")

    def percentile(self, q: float) -> float:
        """The `q`-th percentile (0 to 100), linearly interpolated."""
        if not self.values:
            return float("nan")
        ordered = sorted(self.values)
        position = (len(ordered) - 1) * q / 100
        low = int(position)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (position - low)

    @property
    def spread(self) -> float:
        """The interquartile range over the median: how far the middle half of values lies apart."""
        if not self.values or not self.median:
            return float("nan")
        return (self.percentile(75) - self.percentile(25)) / self.median

    def slow_indices(self) -> tuple[int, ...]:
        """Indices of values that lie far above the rest (see SLOW_IN_MADS); needs 5 values."""
        if len(self.values) < 5:
            return ()
        middle = self.median
        mad = statistics.median(abs(value - middle) for value in self.values)
        # Two percent of the median as a floor: quantized clocks can make the MAD zero.
        limit = middle + max(SLOW_IN_MADS * mad, 0.02 * middle)
        return tuple(i for i, value in enumerate(self.values) if value > limit)

    @property
    def outliers(self) -> str:
        """One line on marked steps far above the median, the slowest first, with why; else ""."""
        ms = {i: self.values[int(i)] for i in self.marks if self.marks[i].startswith("slow")}
        ordered = sorted(ms, key=lambda i: ms[i], reverse=True)
        told = [i for i in ordered if ms[i] >= OUTLIER * self.median]
        if not told:
            return ""
        shown = [
            f"{units.milliseconds(ms[i])} ({self.marks[i].removeprefix('slow, ')})"
            for i in told[:SHOWN_OUTLIERS]
        ]
        more = ["..."] if len(told) > SHOWN_OUTLIERS else []
        many = f"{len(told)} of {units.counted(len(self), 'step')}"
        usual = units.milliseconds(self.median)
        return f"outliers: {many} took far longer than {usual}: {', '.join([*shown, *more])}"

    def with_slow_marked(self) -> Samples:
        """Return the same values with a mark on each that is slow for no reason known here."""
        return replace(self, marks={str(i): SLOW for i in self.slow_indices()})
