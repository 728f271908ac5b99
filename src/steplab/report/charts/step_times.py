"""Step times over one axis of milliseconds: Runs, both sides of a comparison, rungs of a ladder."""

from __future__ import annotations

from collections.abc import Sequence

from steplab.core import Run, Samples, units
from steplab.core.comparison import Change, Comparison
from steplab.core.ladder import Ladder, Rung, named_rungs
from steplab.core.run import rate_name
from steplab.report.charts.plot import LANE_HEIGHT, Scale, axis_lane, lane, legend
from steplab.report.markup import NOTHING, Html, element, join

MAX_RUN_DOTS = 200  # of one Run; beyond that every n-th sample is drawn
MAX_DOTS = 1000  # of one side of a comparison
ROOM = 1.12  # of the longest time, so that its label fits
LONGEST_REASON = 110  # characters; all of it is shown on hovering


def runs_chart(names: Sequence[str], runs: Sequence[Run]) -> Html:
    """Return one lane per Run: a bar to the median, dots for samples.

    A Run without a result has its reason in place of a bar.
    """
    longest = [max(run.clock.step.values) for run in runs if run.clock and run.clock.step.values]
    if not longest:
        return NOTHING
    x = Scale(0.0, ROOM * max(longest))
    lanes = [
        lane(name, _run_marks(run, x), "side-A", tip=f"{name}\n{run.id}")
        for name, run in zip(names, runs, strict=True)
    ]
    return join([*lanes, axis_lane(x)])


def _run_marks(run: Run, x: Scale) -> list[Html]:
    if run.clock is None or not run.clock.step.values:
        words = "no step was timed" if run.status == "ok" else f"{run.status}: {run.reason}"
        return [element("text", words, x="6", y="15", data_tip=words)]
    step = run.clock.step
    words = units.milliseconds(step.median)
    if run.tokens_per_second:
        words += f", {units.count(run.tokens_per_second)} {rate_name([run])}"
    marks = [_bar(step.median, x, words)]
    for index in _every(len(step), MAX_RUN_DOTS):
        marks.append(_sample(step, index, x, cy="11", r="2", class_="change"))
    return [*marks, _run_label(words, step, x)]


def _run_label(words: str, step: Samples, x: Scale) -> Html:
    """The numbers where no dots are: at the bar's beginning, behind the last sample, or far right.

    Inside a bar of less than 0.4 of the width they would not fit on a narrow screen.
    """
    if step.median > 0.4 * x.high:
        return element("text", words, x="6", y="15", class_="inside")
    last = max(step.values)
    if last < 0.6 * x.high:
        return element("text", words, x=x.percent(last), dx="10", y="15")
    return element("text", words, x="100%", dx="-6", y="15", text_anchor="end")


def samples_chart(comparison: Comparison) -> Html:
    """Return one lane of dots per side: from left to right by time, from top to bottom in order."""
    sides = (("A", comparison.samples_a), ("B", comparison.samples_b))
    x = Scale.around(value for _, samples in sides for value in samples.values)
    return join([*(_side_lane(name, samples, x) for name, samples in sides), axis_lane(x)])


def _side_lane(name: str, samples: Samples, x: Scale) -> Html:
    marks = []
    for index in _every(len(samples), MAX_DOTS):
        y = 4 + 32 * index / max(len(samples) - 1, 1)
        marks.append(_sample(samples, index, x, cy=y, r=3, class_=f"dot side-{name}"))
    at, tip = x.percent(samples.median), f"median {units.milliseconds(samples.median)}"
    marks.append(element("line", x1=at, x2=at, y1="0", y2="40", class_="median", data_tip=tip))
    return lane(f"{name}: {units.milliseconds(samples.median)}", marks, "tall", aria_label=tip)


def change_chart(change: Change | None) -> Html:
    """Return the interval of the change beside zero, with the band that could not be seen."""
    if change is None:
        return NOTHING
    least = change.detectable or 0.0
    x = Scale.around(100 * end for end in (change.low, change.high, -least, least, 0.0))
    low, middle, high = (100 * value for value in (change.low, change.value, change.high))
    width = f"{2 * 100 * least / (x.high - x.low) * 100:.2f}%"
    band_tip = f"a change below {units.percent(least)} would often not be seen"
    span = f"{middle:+.2f} % ({low:+.2f} % to {high:+.2f} %)"
    zero, left = x.percent(0.0), x.percent(-100 * least)
    marks = [
        element("rect", x=left, width=width, height="22", class_="band", data_tip=band_tip),
        element("line", x1=zero, x2=zero, y1="0", y2="22", class_="grid"),
        element("line", x1=x.percent(low), x2=x.percent(high), y1="11", y2="11", class_="median"),
        element("circle", cx=x.percent(middle), cy="11", r=5, class_="change", data_tip=span),
    ]
    drawn = lane("change in time", marks, aria_label=f"change in time {span}")
    note = element("p", f"Gray: {band_tip}.", class_="note") if least else NOTHING
    return join([drawn, axis_lane(x, "%", "+"), note])


WORDS_WIDTH = 0.2  # of a rung's lane that time and factor take
INSIDE = 0.75  # of the lane: the words of a longer bar are inside it
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
    x = Scale(0.0, max(times) * ROOM)
    baseline = [_bar(first, x, units.milliseconds(first)), _rung_text(first, x, f"{first:.4g} ms")]
    lanes = [lane("baseline", baseline, "rung-base")]
    in_ms = ladder.objective == "time"
    lanes += [
        lane(name, _rung_marks(rung, x, in_ms), _rung_class(rung))
        for name, rung in named_rungs(ladder.rungs)
    ]
    return join([*lanes, axis_lane(x), _rung_legend()])


def _rung_class(rung: Rung) -> str:
    return _RUNG_CLASS.get(rung.outcome, "rung-red") if rung.green else "rung-red"


def _rung_marks(rung: Rung, x: Scale, in_ms: bool) -> list[Html]:
    if not rung.green or rung.before is None or rung.after is None or rung.gain is None:
        words = f"{rung.outcome}: {rung.reason}"[:LONGEST_REASON]
        return [element("text", words, x="6", y="15", data_tip=rung.reason)]
    before, after = rung.before.median, rung.after.median
    tip = f"{rung.label}: {rung.outcome}\n{rung.reason}"
    marks = [_bar(after, x, tip), _rung_line(before, x, "below", f"below: {before:.4g} ms")]
    if in_ms and rung.ceiling is not None:
        best = max(before - rung.ceiling, 0.0)
        words = f"ceiling: {best:.4g} ms ({rung.ceiling_parts})"
        marks.append(_rung_line(best, x, "ceiling", words))
    # A line close behind the end of the bar would run through the words: they follow it.
    crossed = after < before < min(after + WORDS_WIDTH * x.high, INSIDE * x.high)
    told = rung.outcome if rung.gain.says_nothing else f"{1 / (1 + rung.gain.value):.2f}x"
    words = f"{after:.4g} ms, {told}"
    return [*marks, _rung_text(before if crossed else after, x, words)]


def _rung_line(ms: float, x: Scale, style: str, tip: str) -> Html:
    at = x.percent(ms)
    return element("line", x1=at, x2=at, y1="0", y2=LANE_HEIGHT, class_=style, data_tip=tip)


def _rung_text(ms: float, x: Scale, words: str) -> Html:
    """Words beside the end of a bar, or inside it where there is no room."""
    inside = ms > INSIDE * x.high
    anchor, shift, style = ("end", "-6", "inside") if inside else ("start", "6", None)
    return element(
        "text", words, x=x.percent(ms), dx=shift, y="15", text_anchor=anchor, class_=style
    )


def _rung_legend() -> Html:
    names = (
        ("kept", ".rung-kept"),
        ("no gain, or cannot tell", ".rung-lost"),
        ("red gate or failed", ".rung-red"),
    )
    lines = element("span", "line: the recipe below; dashed: the fastest that the ceiling allows")
    return legend(names, lines)


def _bar(ms: float, x: Scale, tip: str) -> Html:
    """A bar from the beginning of the lane, as wide as `ms`."""
    height = LANE_HEIGHT - 6
    return element(
        "rect", x="0", y="3", width=x.percent(ms), height=height, class_="box", data_tip=tip
    )


def _sample(samples: Samples, index: int, x: Scale, **look: str | float) -> Html:
    """A dot that tells its number and its time."""
    value = samples.values[index]
    tip = f"step {index + 1}: {units.milliseconds(value)}"
    return element("circle", cx=x.percent(value), **look, data_tip=tip)


def _every(count: int, most: int) -> range:
    """Indices of `most` samples or fewer, evenly spread."""
    return range(0, count, max(1, -(-count // most)))
