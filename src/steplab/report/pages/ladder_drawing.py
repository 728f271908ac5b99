"""The ladder drawn: one lane per rung, its time beside that of the recipe below."""

from __future__ import annotations

from steplab import units
from steplab.record.ladder import Ladder, Rung
from steplab.report.pages.axis import axis_html
from steplab.report.pages.markup import Html, element, join

HEIGHT = 22  # px of a lane
WORDS = 0.2  # of the lane that time and factor take
INSIDE = 0.75  # of the lane: words of a longer bar stand in it
LONGEST_REASON = 110  # characters; all of it is shown on hovering
_CLASS = {
    "kept": "rung-kept",
    "needed": "rung-kept",
    "removed": "rung-lost",
    "no gain": "rung-lost",
    "cannot tell": "rung-lost",
}


def ladder_html(ladder: Ladder) -> Html:
    """Return the lanes: the baseline, every rung, and an axis in ms.

    A bar is the time of a step; the line before it is that of the recipe below, in the same turns;
    the mark is how far the ceiling would have let it come. Over a red gate there is no bar.
    """
    first = next((rung.before.median for rung in ladder.rungs if rung.before), None)
    if first is None:
        return element("p", "No rung was measured.", class_="soft")
    times = [s.median for r in ladder.rungs for s in (r.before, r.after) if s is not None]
    most = max(times) * 1.12
    lanes = [_lane("baseline", "rung-base", [_bar(first, most), _word(first, most, first)])]
    in_ms = ladder.objective == "time"
    lanes += [_lane(rung.label, _class(rung), _drawn(rung, most, in_ms)) for rung in ladder.rungs]
    return join([*lanes, axis_html(0.0, most), _legend()])


def _class(rung: Rung) -> str:
    return _CLASS.get(rung.outcome, "rung-red") if rung.green else "rung-red"


def _drawn(rung: Rung, most: float, in_ms: bool) -> list[Html]:
    if not rung.green or rung.before is None or rung.after is None or rung.gain is None:
        words = f"{rung.outcome}: {rung.reason}"[:LONGEST_REASON]
        return [element("text", words, x="6", y="15", data_tip=rung.reason)]
    before, after = rung.before.median, rung.after.median
    tip = f"{rung.label}: {rung.outcome}\n{rung.reason}"
    drawn = [_bar(after, most, tip), _mark(before, most, "below", f"below: {before:.4g} ms")]
    if in_ms and rung.ceiling is not None:
        best = max(before - rung.ceiling, 0.0)
        words = f"ceiling: {best:.4g} ms ({rung.ceiling_parts})"
        drawn.append(_mark(best, most, "ceiling", words))
    # A line close behind the end of the bar would run through the words: they follow it.
    crossed = after < before < min(after + WORDS * most, INSIDE * most)
    place = before if crossed else after
    return [*drawn, _word(place, most, after, f"{1 / (1 + rung.gain.value):.2f}x")]


def _lane(label: str, css: str, drawn: list[Html]) -> Html:
    name = element("div", label, class_="label", data_tip=label)
    picture = element("svg", *drawn, class_=css, role="img", aria_label=label)
    return element("div", name, picture, class_="lane")


def _bar(ms: float, most: float, tip: str = "") -> Html:
    return element(
        "rect", x="0", y="3", width=_at(ms, most), height=str(HEIGHT - 6), class_="box",
        data_tip=tip or units.milliseconds(ms),
    )  # fmt: skip


def _mark(ms: float, most: float, css: str, tip: str) -> Html:
    at = _at(ms, most)
    return element("line", x1=at, x2=at, y1="0", y2=str(HEIGHT), class_=css, data_tip=tip)


def _word(ms: float, most: float, shown: float, factor: str = "") -> Html:
    """The time beside the end of a bar, or inside it where there is no room."""
    words = f"{shown:.4g} ms" + (f", {factor}" if factor else "")
    inside = ms > INSIDE * most
    anchor, shift, css = ("end", "-6", "inside") if inside else ("start", "6", None)
    return element("text", words, x=_at(ms, most), dx=shift, y="15", text_anchor=anchor, class_=css)


def _legend() -> Html:
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
