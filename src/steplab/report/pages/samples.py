"""Every sample of two sides as a dot, and the change of the median with its interval."""

from __future__ import annotations

from steplab import units
from steplab.record import Samples
from steplab.record.comparison import Change, Comparison
from steplab.report.pages.axis import axis_html
from steplab.report.pages.markup import NOTHING, Html, element, join

MOST_DOTS = 1000  # of one side; beyond that every n-th sample is drawn


def samples_html(comparison: Comparison) -> Html:
    """Return one lane of dots per side over a common axis of milliseconds."""
    sides = (("A", comparison.samples_a), ("B", comparison.samples_b))
    values = [value for _, samples in sides for value in samples.values]
    low, high = _padded(min(values), max(values))
    lanes = [_dots(name, samples, low, high) for name, samples in sides]
    return join([*lanes, axis_html(low, high)])


def change_html(change: Change | None) -> Html:
    """Return the interval of the change beside zero, with the band that could not be seen."""
    if change is None:
        return NOTHING
    least = change.detectable or 0.0
    ends = (change.low, change.high, -least, least, 0.0)
    low, high = _padded(min(ends), max(ends))

    def at(value: float) -> str:
        return f"{(value - low) / (high - low) * 100:.2f}%"

    width = f"{2 * least / (high - low) * 100:.2f}%"
    band_tip = f"a change below {units.percent(least)} would often not be seen"
    span = f"{change.value * 100:+.2f} % ({change.low * 100:+.2f} % to {change.high * 100:+.2f} %)"
    drawn = [
        element("rect", x=at(-least), width=width, height="22", class_="band", data_tip=band_tip),
        element("line", x1=at(0), x2=at(0), y1="0", y2="22", class_="grid"),
        element("line", x1=at(change.low), x2=at(change.high), y1="11", y2="11", class_="median"),
        element("circle", cx=at(change.value), cy="11", r=5, class_="change", data_tip=span),
    ]
    label = element("div", "change in time", class_="label")
    picture = element("svg", *drawn, role="img", aria_label=f"change in time {span}")
    lane = element("div", label, picture, class_="lane")
    note = f"Grey: {band_tip}." if least else ""
    told = element("p", note, class_="note") if note else NOTHING
    return join([lane, axis_html(low * 100, high * 100, "%", "+"), told])


def _dots(name: str, samples: Samples, low: float, high: float) -> Html:
    """Samples from left to right by their time; from top to bottom in the order they came."""
    step = -(-len(samples) // MOST_DOTS)
    drawn = []
    for index in range(0, len(samples), step):
        value = samples.values[index]
        x = f"{(value - low) / (high - low) * 100:.2f}%"
        y = 4 + 32 * index / max(len(samples) - 1, 1)
        tip = f"step {index + 1}: {units.milliseconds(value)}"
        drawn.append(element("circle", cx=x, cy=y, r=3, class_=f"dot side-{name}", data_tip=tip))
    middle = f"{(samples.median - low) / (high - low) * 100:.2f}%"
    tip = f"median {units.milliseconds(samples.median)}"
    drawn.append(
        element("line", x1=middle, x2=middle, y1="0", y2="40", class_="median", data_tip=tip)
    )
    label = element("div", f"{name}: {units.milliseconds(samples.median)}", class_="label")
    picture = element("svg", *drawn, class_="tall", role="img", aria_label=tip)
    return element("div", label, picture, class_="lane")


def _padded(low: float, high: float) -> tuple[float, float]:
    """Leave a twentieth free at both ends; a single value gets a little room too."""
    room = (high - low) * 0.05 or abs(low) * 0.05 or 1.0
    return low - room, high + room
