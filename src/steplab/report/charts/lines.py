"""Line charts in panels, or bars where there is one x only: what benchmarks measured, by shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steplab.core.output_file import write_output
from steplab.core.table import cell_text
from steplab.report.charts.plot import (
    LETTER_WIDTH,
    PALETTE,
    LogScale,
    check_plot,
    grid_line,
    png_bytes,
    png_figure,
    png_panels,
    svg_file,
    swatch,
    text,
)
from steplab.report.markup import Html, element

PANEL_WIDTH, PLOT_HEIGHT = 480, 240  # px
LEFT, RIGHT, HEAD, FOOT = 56, 16, 30, 44  # px around a plot
LINE = 16  # px between lines of text
PANEL_INCHES = (5.6, 3.4)
MAX_X_LABELS = 8


@dataclass
class LinePanel:
    """One plot: values by the line's name, then by x."""

    title: str
    lines: dict[str, dict[int, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # below the plot, a line each


@dataclass(frozen=True)
class LineChart:
    """Panels with one x axis, one y axis and one color per name."""

    title: str
    x_name: str
    y_name: str  # with its unit, as in "forward [ms]"
    panels: tuple[LinePanel, ...]

    @property
    def names(self) -> list[str]:
        """The lines of all panels, in order of appearance."""
        return list(dict.fromkeys(name for panel in self.panels for name in panel.lines))

    @property
    def xs(self) -> list[int]:
        """Every x that has a value."""
        lines = [line for panel in self.panels for line in panel.lines.values()]
        return sorted({x for line in lines for x in line})

    @property
    def ys(self) -> list[float]:
        """Every value."""
        return [y for p in self.panels for line in p.lines.values() for y in line.values()]

    def color(self, name: str) -> str:
        """Return the color of a line; beyond eight lines they come again."""
        return PALETTE[self.names.index(name) % len(PALETTE)]


def write_line_chart(chart: LineChart, path: Path, flag: str = "--plot") -> None:
    """Write a .svg or .png file; `flag` is what a user changes if it cannot be written."""
    check_plot(path)
    is_png = path.suffix.lower() == ".png"
    write_output(path, chart_png(chart) if is_png else chart_svg(chart).encode(), flag)


def chart_svg(chart: LineChart) -> str:
    """Return a standalone picture: one panel per shape, two in a row."""
    columns = min(2, len(chart.panels))
    width = max(columns * PANEL_WIDTH, LEFT + int(LETTER_WIDTH * len(chart.title)))
    names, height = _legend(chart, width)
    parts = [text(LEFT, 18, chart.title, style="strong"), *names]
    for begin in range(0, len(chart.panels), columns):
        row = chart.panels[begin : begin + columns]
        for column, panel in enumerate(row):
            place = f"translate({column * PANEL_WIDTH} {height})"
            parts.append(element("g", *_panel(chart, panel), transform=place))
        height += HEAD + PLOT_HEIGHT + FOOT + LINE * max(len(panel.notes) for panel in row)
    return svg_file(width, height, chart.title, parts)


def _legend(chart: LineChart, width: int) -> tuple[list[Html], int]:
    """Return the names with their colors, and where the next thing may begin."""
    parts, x, y = [], float(LEFT), 40
    for name in chart.names:
        room = 30 + LETTER_WIDTH * len(name)
        if x + room > width and x > LEFT:
            x, y = float(LEFT), y + LINE
        parts.append(swatch(x, y, chart.color(name), name))
        x += room
    return parts, y + 8


def _panel(chart: LineChart, panel: LinePanel) -> list[Html]:
    parts = [text(LEFT, 20, panel.title, style="strong")]
    if panel.lines:
        parts += _lines(chart, panel) if len(chart.xs) > 1 else _bars(chart, panel)
    below = HEAD + PLOT_HEIGHT + FOOT - 4
    return parts + [text(LEFT, below + LINE * n, note) for n, note in enumerate(panel.notes)]


def _lines(chart: LineChart, panel: LinePanel) -> list[Html]:
    floor, right = HEAD + PLOT_HEIGHT, PANEL_WIDTH - RIGHT
    x = LogScale.around(chart.xs, LEFT, right)
    y = LogScale.around(chart.ys, floor, HEAD)
    parts = []
    for tick in y.ticks():
        parts.append(grid_line(LEFT, y.at(tick), right, y.at(tick)))
        parts.append(text(LEFT - 6, y.at(tick) + 4, f"{tick:g}", "end"))
    parts += [text(x.at(v), floor + LINE, f"{v:,}", "middle") for v in _some(chart.xs)]
    parts.append(text(right, floor + 2 * LINE, f"{chart.x_name}; {chart.y_name}", "end"))
    for name, values in panel.lines.items():
        color, xs = chart.color(name), sorted(values)
        points = " ".join(f"{x.at(v):.1f},{y.at(values[v]):.1f}" for v in xs)
        parts.append(element("polyline", points=points, fill="none", stroke=color, stroke_width=2))
        for v in xs:
            tip = element("title", f"{name}, {chart.x_name} {v:,}: {cell_text(values[v])}")
            place = {"cx": round(x.at(v), 1), "cy": round(y.at(values[v]), 1)}
            parts.append(element("circle", tip, **place, r=4, fill=color))
    return parts


def _bars(chart: LineChart, panel: LinePanel) -> list[Html]:
    longest = max(chart.ys)
    step = PLOT_HEIGHT / len(panel.lines)
    parts = []
    for number, (name, values) in enumerate(panel.lines.items()):
        (value,) = values.values()
        top = HEAD + number * step
        width = (PANEL_WIDTH - LEFT - RIGHT - 60) * value / longest
        size = {"width": round(width, 1), "height": round(min(step - 4, 28), 1)}
        parts.append(element("rect", x=LEFT, y=round(top, 1), **size, fill=chart.color(name)))
        parts.append(text(LEFT + width + 6, top + min(step, 32) / 2 + 3, cell_text(value)))
    where = f"{chart.x_name} {chart.xs[0]:,}; {chart.y_name}"
    return [*parts, text(PANEL_WIDTH - RIGHT, HEAD + PLOT_HEIGHT + LINE, where, "end")]


def _some(values: Sequence[int]) -> Sequence[int]:
    """Return few enough of them to fit side by side."""
    return values[:: math.ceil(len(values) / MAX_X_LABELS)]


def chart_png(chart: LineChart) -> bytes:
    """Return the same panels as a .png file, by matplotlib."""
    columns = min(2, len(chart.panels))
    rows = math.ceil(len(chart.panels) / columns)
    figure = png_figure(PANEL_INCHES[0] * columns, PANEL_INCHES[1] * rows + 0.9)
    figure.suptitle(chart.title, fontsize=8)
    axes = png_panels(figure, len(chart.panels))
    for one, panel in zip(axes, chart.panels, strict=True):
        (_png_lines if len(chart.xs) > 1 else _png_bars)(one, chart, panel)
        notes = "".join(f"\n{note}" for note in panel.notes)
        one.set_title(f"{panel.title}{notes}", fontsize=8, loc="left")
    return png_bytes(figure)


def _png_lines(axes: Any, chart: LineChart, panel: LinePanel) -> None:
    for name, values in panel.lines.items():
        xs = sorted(values)
        axes.plot(xs, [values[x] for x in xs], color=chart.color(name), marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(chart.xs, [f"{x:,}" for x in chart.xs], fontsize=7)
    axes.set_xlabel(chart.x_name, fontsize=8)
    axes.set_ylabel(chart.y_name, fontsize=8)
    axes.grid(alpha=0.3)
    if panel.lines:
        axes.legend(fontsize=7)


def _png_bars(axes: Any, chart: LineChart, panel: LinePanel) -> None:
    names = list(panel.lines)
    values = [next(iter(panel.lines[name].values())) for name in names]
    bars = axes.barh(names, values, color=[chart.color(name) for name in names])
    axes.bar_label(bars, [cell_text(value) for value in values], fontsize=7, padding=3)
    axes.invert_yaxis()
    axes.tick_params(labelsize=7)
    where = f"{chart.x_name} {chart.xs[0]:,}; " if chart.xs else ""
    axes.set_xlabel(f"{where}{chart.y_name}", fontsize=8)
