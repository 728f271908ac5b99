"""Kernels under the roof of their card: FLOP per byte against FLOP per second."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from steplab.core import units
from steplab.hardware.catalog import Card
from steplab.report.charts.colors import category_class
from steplab.report.charts.plot import LogScale
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
    x = _axis([2.0, 2 * ridge, *(group.intensity for group in groups)], 0.0, 100.0)
    y = _axis([*peaks.values(), *(group.speed for group in groups)], HEIGHT, 0.0)
    drawn = [*_grid(x, y), *_roof(peaks, bandwidth, x, y)]
    longest = groups[0].ns
    drawn += [_dot(group, x, y, longest) for group in groups]
    label = f"FLOP/byte against FLOP/s under the roof of the {card.name}"
    return element("svg", *drawn, height=HEIGHT, role="img", aria_label=label)


def _axis(values: list[float], begin: float, end: float) -> LogScale:
    """Whole decades that hold all values, with some room around them."""
    return LogScale.whole_powers([min(values) / 1.5, max(values) * 1.5], 10, begin, end)


def _grid(x: LogScale, y: LogScale) -> list[Html]:
    parts = []
    for value in x.powers(10):
        at = x.percent(value)
        parts.append(element("line", x1=at, x2=at, y1="0", y2=HEIGHT, class_="grid"))
        if value < x.high:
            words = f"{value:g} FLOP/byte" if value == x.low else f"{value:g}"
            parts.append(element("text", words, x=at, dx="3", y=HEIGHT - 4))
    for value in y.powers(10):
        at = _pixels(value, y)
        parts.append(element("line", x1="0", x2="100%", y1=at, y2=at, class_="grid"))
        if value > y.low:
            parts.append(element("text", f"{units.flops(value)}/s", x="3", y=at, dy="12"))
    return parts


def _roof(peaks: dict[str, float], bandwidth: float, x: LogScale, y: LogScale) -> list[Html]:
    """The slope of the memory up to the highest peak, and a level line for every dtype."""
    highest = max(peaks.values())
    low = max(x.low, y.low / bandwidth)
    ends = {"x1": x.percent(low), "y1": _pixels(low * bandwidth, y)}
    ends |= {"x2": x.percent(highest / bandwidth), "y2": _pixels(highest, y)}
    parts, names = [element("line", class_="roof", **ends)], []
    levels: dict[float, list[str]] = {}
    for dtype, peak in peaks.items():
        levels.setdefault(peak, []).append(dtype)
    for peak, dtypes in levels.items():
        at = _pixels(peak, y)
        dash = None if peak == highest else "4 4"
        begin = x.percent(peak / bandwidth)
        line = {"x1": begin, "x2": "100%", "y1": at, "y2": at, "stroke_dasharray": dash}
        parts.append(element("line", class_="roof", **line))
        name = "/".join(dtypes)
        names.append(element("text", name, x="100%", dx="-4", y=at, dy="-4", text_anchor="end"))
    return [*parts, *names]


def _dot(group: KernelGroup, x: LogScale, y: LogScale, longest: float) -> Html:
    tip = (
        f"{group.name}\n{group.intensity:.3g} FLOP/byte, {units.flops(group.speed)}/s\n"
        f"{units.milliseconds(group.ns / 1e6)} in all profiled steps"
    )
    return element(
        "circle",
        cx=x.percent(group.intensity),
        cy=_pixels(group.speed, y),
        r=round(3 + 11 * math.sqrt(group.ns / longest), 1),
        class_=f"dot {category_class(group.category)}",
        data_tip=tip,
    )


def _pixels(value: float, y: LogScale) -> str:
    return f"{y.at(value):.1f}"
