"""The axis under lanes: a mark and a number at every round value."""

from __future__ import annotations

import math

from steplab.report.pages.markup import Html, element
from steplab.report.pages.timeline import tick_distance


def axis_html(low: float, high: float, unit: str = "ms", sign: str = "") -> Html:
    """Return a lane with the round values from `low` to `high`; `sign` is "+" for changes."""
    step = tick_distance(high - low)
    marks = []
    for index in range(math.ceil(low / step), int(high // step) + 1):
        value = round(index * step, 9)
        x = f"{(value - low) / (high - low) * 100:.2f}%"
        text = f"{value:{sign}g}" if value else "0"
        marks.append(element("line", x1=x, x2=x, y1="0", y2="4", class_="grid"))
        marks.append(element("text", text, x=x, y="14", text_anchor="middle"))
    picture = element("svg", *marks, class_="axis")
    return element("div", element("div", unit, class_="label"), picture, class_="lane")
