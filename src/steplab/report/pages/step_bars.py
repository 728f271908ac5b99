"""Steps of several Runs over one axis of milliseconds: a bar to the median, dots for samples."""

from __future__ import annotations

from collections.abc import Sequence

from steplab import units
from steplab.record import Run, Samples
from steplab.report.pages.axis import axis_html
from steplab.report.pages.markup import NOTHING, Html, element, join

MOST_DOTS = 200  # of one Run; beyond that every n-th sample is drawn
ROOM = 1.12  # of the longest sample, so that its label fits


def step_bars(names: Sequence[str], runs: Sequence[Run]) -> Html:
    """Return one lane per Run; a Run without a result has its reason in place of a bar."""
    longest = [max(run.clock.step.values) for run in runs if run.clock and run.clock.step.values]
    if not longest:
        return NOTHING
    most = ROOM * max(longest)
    lanes = [_lane(name, run, most) for name, run in zip(names, runs, strict=True)]
    return join([*lanes, axis_html(0.0, most)])


def _lane(name: str, run: Run, most: float) -> Html:
    label = element("div", name, class_="label", data_tip=f"{name}\n{run.id}")
    drawn = _drawn(run, most)
    picture = element("svg", *drawn, class_="side-A", role="img", aria_label=name)
    return element("div", label, picture, class_="lane")


def _drawn(run: Run, most: float) -> list[Html]:
    if run.clock is None or not run.clock.step.values:
        words = "no step was timed" if run.status == "ok" else f"{run.status}: {run.reason}"
        return [element("text", words, x="6", y="15", data_tip=words)]
    step = run.clock.step
    at = f"{step.median / most * 100:.2f}%"
    words = units.milliseconds(step.median)
    if run.tokens_per_second:
        words += f", {units.count(run.tokens_per_second)} tokens/s"
    drawn = [element("rect", x="0", y="3", width=at, height="16", class_="box", data_tip=words)]
    for index in range(0, len(step), -(-len(step) // MOST_DOTS)):
        value = step.values[index]
        tip = f"step {index + 1}: {units.milliseconds(value)}"
        x = f"{value / most * 100:.2f}%"
        drawn.append(element("circle", cx=x, cy="11", r="2", class_="change", data_tip=tip))
    return [*drawn, _label(words, step, most)]


def _label(words: str, step: Samples, most: float) -> Html:
    """The numbers where no dots are: at the bar's beginning, behind the last sample, or far right.

    Inside a bar of less than 0.4 of the width they would not fit on a narrow screen.
    """
    if step.median > 0.4 * most:
        return element("text", words, x="6", y="15", class_="inside")
    last = max(step.values) / most
    if last < 0.6:
        return element("text", words, x=f"{last * 100:.2f}%", dx="10", y="15")
    return element("text", words, x="100%", dx="-6", y="15", text_anchor="end")
