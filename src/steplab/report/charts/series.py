"""Small charts of series, side by side: lines over points and a band of quantiles.

Drawn as SVG on a page, or by matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from steplab.core.table import cell_text
from steplab.report.charts.plot import (
    LETTER_WIDTH,
    Scale,
    area_path,
    grid_line,
    legend,
    line_path,
    png_panels,
    png_text,
    text,
)
from steplab.report.markup import Html, element, join

WIDTH, HEIGHT = 560, 240
LEFT, RIGHT, TOP, FLOOR = 56, 552, 10, 214  # the drawn area
MAX_TIPS = 128  # per panel; with more points than that, neighbors share one
GRID = "display:grid;grid-template-columns:repeat(auto-fill,minmax(min(420px,100%),1fr));gap:18px"
BAND_OPACITY = 0.18


class LineStyle(NamedTuple):
    """How a line is drawn; the width is in px."""

    page_color: str
    print_color: str
    width: float


STYLES = {
    "past": LineStyle("var(--soft)", "#5d6675", 1.3),
    "truth": LineStyle("var(--ink)", "#1c2128", 1.6),
    "seasonal naive": LineStyle("#d98324", "#d98324", 1.2),
    "forecast": LineStyle("var(--accent)", "#2f57bd", 2.0),
    "model": LineStyle("var(--accent)", "#2f57bd", 2.0),
}
BAND = STYLES["forecast"]


@dataclass(frozen=True)
class SeriesPanel:
    """One chart. Points are numbered from 0; NaN is a gap in a line."""

    title: str
    start: int  # number of the first forecast point
    points: int  # in all
    lines: Mapping[str, tuple[int, Sequence[float]]]  # (number of its first point, values) by name
    band: tuple[Sequence[float], Sequence[float]] | None = None  # low and high, from `start` on
    band_name: str = ""
    # Below the chart: at its left end, at the first and at the last forecast point.
    marks: tuple[str, str, str] = ("", "", "")

    def values_at(self, point: int) -> dict[str, float]:
        """Return the values of all lines that pass a point, by name."""
        return {
            name: values[point - first]
            for name, (first, values) in self.lines.items()
            if first <= point < first + len(values)
        }


def series_html(panels: Sequence[SeriesPanel]) -> Html:
    """Return a legend and the panels in a grid."""
    names = dict.fromkeys(name for panel in panels for name in panel.lines)
    colors = [(name, STYLES[name].page_color) for name in names]
    band = next((panel.band_name for panel in panels if panel.band_name), "")
    if band:
        share = f"{BAND_OPACITY:.0%}"
        colors.append((band, f"color-mix(in srgb,{BAND.page_color} {share},transparent)"))
    figures = [element("figure", *_figure(panel), style="margin:0") for panel in panels]
    return join([legend(colors), element("div", *figures, style=GRID)])


def draw_series(figure: Any, panels: Sequence[SeriesPanel], legend_place: str) -> None:
    """Draw panels two in a row on a matplotlib figure or subfigure, with one legend for all."""
    all_axes = png_panels(figure, len(panels))
    for axes, panel in zip(all_axes, panels, strict=True):
        _draw_panel(axes, panel)
    handles, names = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc=legend_place, ncols=len(names), fontsize=8, frameon=False)


def _draw_panel(axes: Any, panel: SeriesPanel) -> None:
    if panel.band is not None:
        ahead = range(panel.start, panel.start + len(panel.band[0]))
        look = {"color": BAND.print_color, "alpha": BAND_OPACITY, "lw": 0}
        axes.fill_between(ahead, *panel.band, label=panel.band_name, **look)
    for name, (first, values) in panel.lines.items():
        look = {"color": STYLES[name].print_color, "lw": 0.8 * STYLES[name].width}
        axes.plot(range(first, first + len(values)), values, label=name, **look)
    axes.axvline(panel.start, color=STYLES["past"].print_color, lw=0.8, ls=":")
    axes.set_title(png_text(panel.title), fontsize=9, loc="left")
    axes.tick_params(labelsize=7)
    if any(panel.marks):
        ticks = [0, panel.start, panel.points - 1]
        axes.set_xticks(ticks, [png_text(mark) for mark in panel.marks], fontsize=7)
        for label, side in zip(axes.get_xticklabels(), ("left", "right", "right"), strict=True):
            label.set_horizontalalignment(side)


def _figure(panel: SeriesPanel) -> tuple[Html, Html]:
    x = Scale(0, max(panel.points - 1, 1), LEFT, RIGHT)
    lists = [*(values for _, values in panel.lines.values()), *(panel.band or ())]
    y = Scale.around((value for values in lists for value in values), FLOOR, TOP)

    def at(first: int, values: Sequence[float]) -> list[tuple[float, float]]:
        return [(x.at(first + index), y.at(value)) for index, value in enumerate(values)]

    drawn = [*_value_axis(y), *_marks(panel, x)]
    if panel.band is not None:
        low, high = (at(panel.start, values) for values in panel.band)
        look = f"fill:{BAND.page_color};fill-opacity:{BAND_OPACITY};stroke:none"
        drawn.append(element("path", d=area_path(low, high), style=look))
    for name, (first, values) in panel.lines.items():
        color, _, width = STYLES[name]
        look = f"fill:none;stroke:{color};stroke-width:{width}"
        drawn.append(element("path", d=line_path(at(first, values)), style=look))
    drawn += _tips(panel, x)
    box = f"0 0 {WIDTH} {HEIGHT}"
    picture = element("svg", *drawn, viewBox=box, role="img", aria_label=panel.title)
    return element("figcaption", panel.title, class_="name"), picture


def _value_axis(y: Scale) -> list[Html]:
    """Draw horizontal lines with their values."""
    drawn = []
    for value in y.ticks():
        drawn.append(grid_line(LEFT, y.at(value), RIGHT, y.at(value)))
        drawn.append(text(LEFT - 6, y.at(value) + 4, f"{value:.6g}", "end"))
    return drawn


def _marks(panel: SeriesPanel, x: Scale) -> list[Html]:
    """Draw the border between past and forecast, and the marks below."""
    start = x.at(panel.start)
    look = "stroke:var(--soft);stroke-dasharray:3 3"
    drawn = [element("line", x1=start, x2=start, y1=TOP, y2=FLOOR, style=look)]
    left, middle, right = panel.marks
    placed: list[tuple[float, str, str]] = [(LEFT, left, "start"), (RIGHT, right, "end")]
    # The middle one ends at its line, where it cannot overlap the right one; it is left out if it
    # would overlap the left one.
    if start > LEFT + LETTER_WIDTH * (len(left) + len(middle) + 2):
        placed.append((start, middle, "end"))
    return drawn + [text(at, HEIGHT - 8, mark, side) for at, mark, side in placed if mark]


def _tips(panel: SeriesPanel, x: Scale) -> list[Html]:
    """Lay invisible boxes over the forecast that show its values."""
    count = panel.points - panel.start
    step = -(-count // MAX_TIPS)
    width = x.at(step) - x.at(0)
    drawn = []
    for index in range(0, count, step):
        point = panel.start + index
        lines = [
            f"{name} point {index + 1}: {cell_text(float(value))}"
            for name, value in panel.values_at(point).items()
        ]
        if panel.band is not None:
            low, high = (cell_text(float(values[index])) for values in panel.band)
            lines.append(f"{panel.band_name}: {low} to {high}")
        box = {"x": x.at(point) - width / 2, "y": TOP, "width": width, "height": FLOOR - TOP}
        tip = "\n".join(lines)
        drawn.append(element("rect", **box, data_tip=tip, style="fill:transparent"))
    return drawn
