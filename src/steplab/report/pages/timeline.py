"""One step drawn over time."""

from __future__ import annotations

import math

from steplab import units
from steplab.report.pages.lanes import PHASES_LABEL, Lane, lanes_of, typical_window
from steplab.report.pages.markup import NOTHING, Html, element, join
from steplab.report.pages.thinning import Box, thin
from steplab.trace.analysis import Analysis, Window

TICKS = 6  # about so many on the axis


class Names:
    """Texts that boxes name by their number, each kept once."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        """Return the number of `text`."""
        return self.numbers.setdefault(text, len(self.numbers))

    @property
    def texts(self) -> list[str]:
        """All texts, by number."""
        return list(self.numbers)


def timeline_html(analysis: Analysis, names: Names) -> Html:
    """Return the lanes of the typical step over one axis; hovering a box tells its name."""
    window = typical_window(analysis)
    lanes = lanes_of(analysis)
    boxes = thin(lanes, max(window.end - window.start, 1))
    rows = [_lane(lane, own, window, names) for lane, own in zip(lanes, boxes, strict=True)]
    return join([*rows, _axis(window)])


def _lane(lane: Lane, boxes: list[Box], window: Window, names: Names) -> Html:
    drawn = [_rectangle(lane, box, window, names) for box in boxes]
    if lane.label == PHASES_LABEL:
        following = [*(box.start for box in boxes[1:]), window.end]
        drawn += [_name(lane, *pair, window) for pair in zip(boxes, following, strict=True)]
    label = element("div", lane.label, class_="label", title=lane.label)
    picture = element("svg", *drawn, role="img", aria_label=lane.label)
    return element("div", label, picture, class_="lane")


def _rectangle(lane: Lane, box: Box, window: Window, names: Names) -> Html:
    length = window.end - window.start
    time = units.milliseconds((box.end - box.start) / 1e6)
    others = f" and {box.count - 1} more" if box.count > 1 else ""
    return element(
        "rect",
        x=f"{(box.start - window.start) / length * 100:.3f}%",
        width=f"{max((box.end - box.start) / length * 100, 0.03):.3f}%",
        height="22",
        class_=f"box {lane.classes[box.colour]}",
        data_n=str(names.number(lane.names[box.name])),
        data_d=f"{time}{others}",
    )


def _name(lane: Lane, box: Box, following: int, window: Window) -> Html:
    """A phase's name, cut where the next box begins; none below a twentieth of the width."""
    length = window.end - window.start
    free = (min(box.end, following) - box.start) / length
    if box.count > 1 or free < 0.05:
        return NOTHING
    x = f"{(box.start - window.start) / length * 100:.3f}%"
    name = element("text", lane.names[box.name], x="6", y="15", class_="inside")
    return element("svg", name, x=x, width=f"{free * 100:.3f}%", height="22")


def _axis(window: Window) -> Html:
    length = (window.end - window.start) / 1e6
    step = tick_distance(length)
    marks = []
    for index in range(math.floor(length / step) + 1):
        x = f"{index * step / length * 100:.3f}%"
        anchor = "start" if index == 0 else "middle"
        marks.append(element("line", x1=x, x2=x, y1="0", y2="4", class_="grid"))
        marks.append(element("text", f"{index * step:g}", x=x, y="14", text_anchor=anchor))
    picture = element("svg", *marks, class_="axis")
    return element("div", element("div", "ms", class_="label"), picture, class_="lane")


def tick_distance(length: float) -> float:
    """Return 1, 2 or 5 times a power of ten so that TICKS or fewer fit into `length`."""
    if length <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(length / TICKS))
    return next(power * factor for factor in (1, 2, 5, 10) if length / (power * factor) <= TICKS)
