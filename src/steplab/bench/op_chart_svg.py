"""A chart as an .svg file that needs nothing: lines over a logarithmic axis, or bars. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from steplab.bench.op_chart import Chart, ChartPanel
from steplab.core.table import cell_text

PANEL_WIDTH, PLOT_HEIGHT = 480, 240  # px
LEFT, RIGHT, HEAD, FOOT = 56, 16, 30, 44  # px around a plot
LINE = 16  # px between lines of text
LETTER = 6.6  # px, about the width of a 12 px letter
STYLE = """
.steplab-chart { --paper: #ffffff; --ink: #1f2328; --faint: #d8dee4; }
@media (prefers-color-scheme: dark) {
  .steplab-chart { --paper: #16181d; --ink: #e6e8eb; --faint: #3a3f47; }
}
.steplab-chart text { fill: var(--ink); font: 12px system-ui, sans-serif; }
.steplab-chart .strong { font-weight: 600; }
.steplab-chart .paper { fill: var(--paper); }
.steplab-chart .grid { stroke: var(--faint); }
"""


class Scale:
    """Maps values to px on a logarithmic axis."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        self.low, self.high = low / 1.3, high * 1.3
        self.begin, self.end = begin, end

    def at(self, value: float) -> float:
        """Return the place of a value."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.begin + share * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Return 1, 2 and 5 times powers of ten inside the axis; over many decades the powers."""
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        steps = (1,) if len(powers) > 5 else (1, 2, 5)
        ticks = [step * 10.0**power for power in powers for step in steps]
        return [tick for tick in ticks if self.low <= tick <= self.high]


def chart_svg(chart: Chart) -> str:
    """Return a drawing that stands alone, light or dark as the reader's system is."""
    columns = min(2, len(chart.panels))
    width = max(columns * PANEL_WIDTH, LEFT + int(LETTER * len(chart.title)))
    legend, top = _legend(chart, width)
    parts = [_text(LEFT, 18, chart.title, "strong"), *legend]
    height = top
    for begin in range(0, len(chart.panels), columns):
        drawn = chart.panels[begin : begin + columns]
        for column, panel in enumerate(drawn):
            parts += [f'<g transform="translate({column * PANEL_WIDTH} {height})">']
            parts += [*_panel(chart, panel), "</g>"]
        height += HEAD + PLOT_HEIGHT + FOOT + LINE * max(len(panel.failed) for panel in drawn)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="steplab-chart" role="img" '
        f'viewBox="0 0 {width} {height}" aria-label="{escape(chart.title)}">'
    )
    paper = f'<rect class="paper" width="{width}" height="{height}"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", paper, *parts, "</svg>"]) + "\n"


def _legend(chart: Chart, width: int) -> tuple[list[str], int]:
    """Return the names of the ways with their colours, and where the next thing may begin."""
    parts, x, y = [], float(LEFT), 40
    for way in chart.ways:
        room = 30 + LETTER * len(way)
        if x + room > width and x > LEFT:
            x, y = float(LEFT), y + LINE
        parts.append(f'<rect x="{x:.0f}" y="{y - 10}" width="12" height="12" '
                     f'fill="{chart.colour(way)}"/>')  # fmt: skip
        parts.append(_text(x + 17, y, way))
        x += room
    return parts, y + 8


def _panel(chart: Chart, panel: ChartPanel) -> list[str]:
    parts = [_text(LEFT, 20, panel.title, "strong")]
    if panel.lines:
        parts += _lines(chart, panel) if len(chart.xs) > 1 else _bars(chart, panel)
    below = HEAD + PLOT_HEIGHT + FOOT - 4
    parts += [_text(LEFT, below + LINE * n, text) for n, text in enumerate(panel.failed)]
    return parts


def _lines(chart: Chart, panel: ChartPanel) -> list[str]:
    floor, right = HEAD + PLOT_HEIGHT, PANEL_WIDTH - RIGHT
    x = Scale(min(chart.xs), max(chart.xs), LEFT, right)
    y = Scale(min(chart.ys), max(chart.ys), floor, HEAD)
    parts = []
    for tick in y.ticks():
        at = y.at(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_text(LEFT - 6, at + 4, f"{tick:g}", anchor="end"))
    parts += [_text(x.at(v), floor + LINE, f"{v:,}", anchor="middle") for v in _some(chart.xs)]
    parts.append(_text(right, floor + 2 * LINE, f"{chart.x_name}; {chart.y_name}", anchor="end"))
    for way, values in panel.lines.items():
        colour = chart.colour(way)
        points = [(x.at(v), y.at(values[v])) for v in sorted(values)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (a, b), v in zip(points, sorted(values), strict=True):
            tip = f"{way}, {chart.x_name} {v:,}: {cell_text(values[v])}"
            parts.append(
                f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{colour}">'
                f"<title>{escape(tip)}</title></circle>"
            )
    return parts


def _bars(chart: Chart, panel: ChartPanel) -> list[str]:
    longest = max(chart.ys)
    step = PLOT_HEIGHT / len(panel.lines)
    parts = []
    for number, (way, values) in enumerate(panel.lines.items()):
        (value,) = values.values()
        top = HEAD + number * step
        width = (PANEL_WIDTH - LEFT - RIGHT - 60) * value / longest
        size = f'width="{width:.1f}" height="{min(step - 4, 28):.1f}"'
        parts.append(f'<rect x="{LEFT}" y="{top:.1f}" {size} fill="{chart.colour(way)}"/>')
        parts.append(_text(LEFT + width + 6, top + min(step, 32) / 2 + 3, cell_text(value)))
    where = f"{chart.x_name} {chart.xs[0]:,}; {chart.y_name}"
    return [*parts, _text(PANEL_WIDTH - RIGHT, HEAD + PLOT_HEIGHT + LINE, where, anchor="end")]


def _some(values: Sequence[int]) -> Sequence[int]:
    """Return few enough to stand side by side."""
    return values[:: math.ceil(len(values) / 8)]


def _text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(words)}</text>'
