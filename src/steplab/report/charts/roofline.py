"""Kernels under the roof of their card: FLOP per byte against FLOP per second."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from steplab.core import units
from steplab.hardware.catalog import Card
from steplab.report.charts.colors import category_class
from steplab.report.markup import NOTHING, Html, element
from steplab.trace.analysis import Analysis

HEIGHT = 340  # px
MAX_GROUPS = 150  # the longest ones; the rest would be dots without weight


@dataclass(frozen=True)
class KernelGroup:
    """All launches of one kernel whose FLOPs and bytes are known."""

    name: str
    category: str
    ns: float
    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.bytes

    @property
    def speed(self) -> float:
        """FLOP per second."""
        return self.flops / self.ns * 1e9


@dataclass(frozen=True)
class LogAxis:
    """A logarithmic axis over whole decades."""

    low: int  # power of ten
    high: int

    def share(self, value: float) -> float:
        """Return where `value` lies between the ends, 0 to 1."""
        return (math.log10(value) - self.low) / (self.high - self.low)

    @classmethod
    def over(cls, values: list[float]) -> LogAxis:
        """Return the axis that holds all values, with some room around them."""
        low, high = (
            math.floor(math.log10(min(values) / 1.5)),
            math.ceil(math.log10(max(values) * 1.5)),
        )
        return cls(low, max(high, low + 1))


def kernel_groups(analysis: Analysis) -> list[KernelGroup]:
    """Return the modeled kernels by name, the longest first."""
    work = analysis.work
    known = (work.flops > 0) & (work.bytes > 0) & (work.duration > 0) & (work.step >= 0)
    rows = np.flatnonzero(known)
    used, first, codes = np.unique(work.name[rows], return_index=True, return_inverse=True)
    sums = [
        np.bincount(codes, weights=column[rows], minlength=len(used))
        for column in (work.duration, work.flops, work.bytes)
    ]
    groups = [
        KernelGroup(work.labels[code], work.labels[work.category[rows[row]]], *map(float, values))
        for code, row, *values in zip(used, first, *sums, strict=True)
    ]
    return sorted(groups, key=lambda group: -group.ns)[:MAX_GROUPS]


def roofline_chart(analysis: Analysis, card: Card | None) -> Html:
    """Return the plot; nothing when no kernel has a model or the card is unknown."""
    groups = kernel_groups(analysis)
    if not groups or card is None:
        return NOTHING
    peaks = {dtype: tflops * 1e12 for dtype, tflops in card.tflops.items()}
    bandwidth = card.bandwidth_gbs * 1e9
    ridge = max(peaks.values()) / bandwidth
    x = LogAxis.over([2.0, 2 * ridge, *(group.intensity for group in groups)])
    y = LogAxis.over([min(peaks.values()), max(peaks.values()), *(group.speed for group in groups)])
    drawn = [*_grid(x, y), *_roof(peaks, bandwidth, x, y)]
    longest = groups[0].ns
    drawn += [_dot(group, x, y, longest) for group in groups]
    label = f"FLOP/byte against FLOP/s under the roof of the {card.name}"
    return element("svg", *drawn, height=str(HEIGHT), role="img", aria_label=label)


def _grid(x: LogAxis, y: LogAxis) -> list[Html]:
    parts = []
    for power in range(x.low, x.high + 1):
        at = _x(10.0**power, x)
        parts.append(element("line", x1=at, x2=at, y1="0", y2=str(HEIGHT), class_="grid"))
        if power < x.high:
            text = f"{10.0**power:g} FLOP/byte" if power == x.low else f"{10.0**power:g}"
            parts.append(element("text", text, x=at, dx="3", y=str(HEIGHT - 4)))
    for power in range(y.low, y.high + 1):
        at = _y(10.0**power, y)
        parts.append(element("line", x1="0", x2="100%", y1=at, y2=at, class_="grid"))
        if power > y.low:
            parts.append(element("text", f"{units.flops(10.0**power)}/s", x="3", y=at, dy="12"))
    return parts


def _roof(peaks: dict[str, float], bandwidth: float, x: LogAxis, y: LogAxis) -> list[Html]:
    """The slope of the memory up to the highest peak, and a level line for every dtype."""
    highest = max(peaks.values())
    low = max(10.0**x.low, 10.0**y.low / bandwidth)
    ends = {"x1": _x(low, x), "y1": _y(low * bandwidth, y)}
    ends |= {"x2": _x(highest / bandwidth, x), "y2": _y(highest, y)}
    parts, names = [element("line", class_="roof", **ends)], []
    told: dict[float, list[str]] = {}
    for dtype, peak in peaks.items():
        told.setdefault(peak, []).append(dtype)
    for peak, dtypes in told.items():
        at = _y(peak, y)
        dash = None if peak == highest else "4 4"
        begin = _x(peak / bandwidth, x)
        line = {"x1": begin, "x2": "100%", "y1": at, "y2": at, "stroke_dasharray": dash}
        parts.append(element("line", class_="roof", **line))
        name = "/".join(dtypes)
        names.append(element("text", name, x="100%", dx="-4", y=at, dy="-4", text_anchor="end"))
    return [*parts, *names]


def _dot(group: KernelGroup, x: LogAxis, y: LogAxis, longest: float) -> Html:
    tip = (
        f"{group.name}\n{group.intensity:.3g} FLOP/byte, {units.flops(group.speed)}/s\n"
        f"{units.milliseconds(group.ns / 1e6)} in all profiled steps"
    )
    return element(
        "circle",
        cx=_x(group.intensity, x),
        cy=_y(group.speed, y),
        r=round(3 + 11 * math.sqrt(group.ns / longest), 1),
        class_=f"dot {category_class(group.category)}",
        data_tip=tip,
    )


def _x(value: float, axis: LogAxis) -> str:
    return f"{axis.share(value) * 100:.2f}%"


def _y(value: float, axis: LogAxis) -> str:
    return f"{(1 - axis.share(value)) * HEIGHT:.1f}"
