"""Step times over one axis of milliseconds: of several Runs, of both sides of a comparison, of the rungs of a ladder."""

from __future__ import annotations

import math
from collections.abc import Sequence

from steplab.core import Run, Samples, units
from steplab.core.comparison import Change, Comparison
from steplab.core.ladder import Ladder, Rung
from steplab.report.charts.timeline import tick_distance
from steplab.report.markup import NOTHING, Html, element, join


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


MAX_RUN_DOTS = 200  # of one Run; beyond that every n-th sample is drawn
ROOM = 1.12  # of the longest sample, so that its label fits


def runs_chart(names: Sequence[str], runs: Sequence[Run]) -> Html:
    """Return one lane per Run; a Run without a result has its reason in place of a bar."""
    longest = [max(run.clock.step.values) for run in runs if run.clock and run.clock.step.values]
    if not longest:
        return NOTHING
    most = ROOM * max(longest)
    lanes = [_run_lane(name, run, most) for name, run in zip(names, runs, strict=True)]
    return join([*lanes, axis_html(0.0, most)])


def _run_lane(name: str, run: Run, most: float) -> Html:
    label = element("div", name, class_="label", data_tip=f"{name}\n{run.id}")
    drawn = _run_marks(run, most)
    picture = element("svg", *drawn, class_="side-A", role="img", aria_label=name)
    return element("div", label, picture, class_="lane")


def _run_marks(run: Run, most: float) -> list[Html]:
    if run.clock is None or not run.clock.step.values:
        words = "no step was timed" if run.status == "ok" else f"{run.status}: {run.reason}"
        return [element("text", words, x="6", y="15", data_tip=words)]
    step = run.clock.step
    at = f"{step.median / most * 100:.2f}%"
    words = units.milliseconds(step.median)
    if run.tokens_per_second:
        words += f", {units.count(run.tokens_per_second)} tokens/s"
    drawn = [element("rect", x="0", y="3", width=at, height="16", class_="box", data_tip=words)]
    for index in range(0, len(step), -(-len(step) // MAX_RUN_DOTS)):
        value = step.values[index]
        tip = f"step {index + 1}: {units.milliseconds(value)}"
        x = f"{value / most * 100:.2f}%"
        drawn.append(element("circle", cx=x, cy="11", r="2", class_="change", data_tip=tip))
    return [*drawn, _run_label(words, step, most)]


def _run_label(words: str, step: Samples, most: float) -> Html:
    """The numbers where no dots are: at the bar's beginning, behind the last sample, or far right.

    Inside a bar of less than 0.4 of the width they would not fit on a narrow screen.
    """
    if step.median > 0.4 * most:
        return element("text", words, x="6", y="15", class_="inside")
    last = max(step.values) / most
    if last < 0.6:
        return element("text", words, x=f"{last * 100:.2f}%", dx="10", y="15")
    return element("text", words, x="100%", dx="-6", y="15", text_anchor="end")


MAX_DOTS = 1000  # of one side; beyond that every n-th sample is drawn


def samples_chart(comparison: Comparison) -> Html:
    """Return one lane of dots per side over a common axis of milliseconds."""
    sides = (("A", comparison.samples_a), ("B", comparison.samples_b))
    values = [value for _, samples in sides for value in samples.values]
    low, high = _padded(min(values), max(values))
    lanes = [_dots(name, samples, low, high) for name, samples in sides]
    return join([*lanes, axis_html(low, high)])


def change_chart(change: Change | None) -> Html:
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
    note = f"Gray: {band_tip}." if least else ""
    told = element("p", note, class_="note") if note else NOTHING
    return join([lane, axis_html(low * 100, high * 100, "%", "+"), told])


def _dots(name: str, samples: Samples, low: float, high: float) -> Html:
    """Samples from left to right by their time; from top to bottom in the order they came."""
    step = -(-len(samples) // MAX_DOTS)
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


HEIGHT = 22  # px of a lane
WORDS = 0.2  # of the lane that time and factor take
INSIDE = 0.75  # of the lane: words of a longer bar stand in it
LONGEST_REASON = 110  # characters; all of it is shown on hovering
_RUNG_CLASS = {
    "kept": "rung-kept",
    "needed": "rung-kept",
    "removed": "rung-lost",
    "no gain": "rung-lost",
    "cannot tell": "rung-lost",
}


def ladder_chart(ladder: Ladder) -> Html:
    """Return the lanes: the baseline, every rung, and an axis in ms.

    A bar is the time of a step; the line before it is that of the recipe below, in the same turns;
    the mark is how far the ceiling would have let it come. Over a red gate there is no bar.
    """
    first = next((rung.before.median for rung in ladder.rungs if rung.before), None)
    if first is None:
        return element("p", "No rung was measured.", class_="soft")
    times = [s.median for r in ladder.rungs for s in (r.before, r.after) if s is not None]
    most = max(times) * 1.12
    lanes = [
        _rung_lane(
            "baseline", "rung-base", [_rung_bar(first, most), _rung_text(first, most, first)]
        )
    ]
    in_ms = ladder.objective == "time"
    lanes += [
        _rung_lane(rung.label, _rung_class(rung), _rung_marks(rung, most, in_ms))
        for rung in ladder.rungs
    ]
    return join([*lanes, axis_html(0.0, most), _rung_legend()])


def _rung_class(rung: Rung) -> str:
    return _RUNG_CLASS.get(rung.outcome, "rung-red") if rung.green else "rung-red"


def _rung_marks(rung: Rung, most: float, in_ms: bool) -> list[Html]:
    if not rung.green or rung.before is None or rung.after is None or rung.gain is None:
        words = f"{rung.outcome}: {rung.reason}"[:LONGEST_REASON]
        return [element("text", words, x="6", y="15", data_tip=rung.reason)]
    before, after = rung.before.median, rung.after.median
    tip = f"{rung.label}: {rung.outcome}\n{rung.reason}"
    drawn = [
        _rung_bar(after, most, tip),
        _rung_line(before, most, "below", f"below: {before:.4g} ms"),
    ]
    if in_ms and rung.ceiling is not None:
        best = max(before - rung.ceiling, 0.0)
        words = f"ceiling: {best:.4g} ms ({rung.ceiling_parts})"
        drawn.append(_rung_line(best, most, "ceiling", words))
    # A line close behind the end of the bar would run through the words: they follow it.
    crossed = after < before < min(after + WORDS * most, INSIDE * most)
    place = before if crossed else after
    return [*drawn, _rung_text(place, most, after, f"{1 / (1 + rung.gain.value):.2f}x")]


def _rung_lane(label: str, css: str, drawn: list[Html]) -> Html:
    name = element("div", label, class_="label", data_tip=label)
    picture = element("svg", *drawn, class_=css, role="img", aria_label=label)
    return element("div", name, picture, class_="lane")


def _rung_bar(ms: float, most: float, tip: str = "") -> Html:
    return element(
        "rect", x="0", y="3", width=_at(ms, most), height=str(HEIGHT - 6), class_="box",
        data_tip=tip or units.milliseconds(ms),
    )  # fmt: skip


def _rung_line(ms: float, most: float, css: str, tip: str) -> Html:
    at = _at(ms, most)
    return element("line", x1=at, x2=at, y1="0", y2=str(HEIGHT), class_=css, data_tip=tip)


def _rung_text(ms: float, most: float, shown: float, factor: str = "") -> Html:
    """The time beside the end of a bar, or inside it where there is no room."""
    words = f"{shown:.4g} ms" + (f", {factor}" if factor else "")
    inside = ms > INSIDE * most
    anchor, shift, css = ("end", "-6", "inside") if inside else ("start", "6", None)
    return element("text", words, x=_at(ms, most), dx=shift, y="15", text_anchor=anchor, class_=css)


def _rung_legend() -> Html:
    words = (
        ("rung-kept", "kept"),
        ("rung-lost", "no gain, or cannot tell"),
        ("rung-red", "red gate or failed"),
    )
    swatches = [element("span", element("i", class_=f"swatch {css}"), text) for css, text in words]
    lines = element("span", "line: the recipe below; dashes: as far as the ceiling would let it")
    return element("div", *swatches, lines, class_="legend")


def _at(ms: float, most: float) -> str:
    return f"{ms / most * 100:.2f}%"
