"""Forecasts as one self-contained page: a small picture per series."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from steplab.core.table import cell_text
from steplab.forecasting.panels import Panel, Picture
from steplab.report.charts.plot import nice_step
from steplab.report.markup import NOTHING, Html, element, join
from steplab.report.pages.document import Section, paragraphs, write_page

WIDTH, HEIGHT = 560, 240
LEFT, RIGHT, TOP, FLOOR = 56, 552, 10, 214  # the drawn area
TEXT_WIDTH = 6.5  # of a character, about
MAX_TIPS = 128  # of one panel; beyond that neighbours share one
GRID = "display:grid;grid-template-columns:repeat(auto-fill,minmax(min(420px,100%),1fr));gap:18px"
PAST = "fill:none;stroke:var(--soft);stroke-width:1.4"
FORECAST = "fill:none;stroke:var(--accent);stroke-width:2"
BAND = "fill:var(--accent);fill-opacity:.18;stroke:none"
NOW = "stroke:var(--soft);stroke-dasharray:3 3"


@dataclass(frozen=True)
class Plot:
    """From points and values to the places of a drawing."""

    points: int  # past and forecast
    low: float
    high: float

    def x(self, point: float) -> float:
        """Return the place of a point by its number."""
        return LEFT + (RIGHT - LEFT) * point / max(self.points - 1, 1)

    def y(self, value: float) -> float:
        """Return the height of a value."""
        return FLOOR - (FLOOR - TOP) * (value - self.low) / (self.high - self.low)


def write_forecast_page(picture: Picture, path: Path) -> None:
    """Write a page that needs nothing but itself."""
    figures = [element("figure", *_panel(one), style="margin:0") for one in picture.panels]
    content = join([_legend(picture.panels), element("div", *figures, style=GRID)])
    section = Section("forecasts", "Forecasts", content, picture.note)
    write_page(path, picture.title, NOTHING, [section], paragraphs(list(picture.foot)))


def _panel(panel: Panel) -> tuple[Html, Html]:
    plot = _plot(panel)
    start = len(panel.past)
    drawn = [*_scale(plot), *_times(panel, plot)]
    if panel.low is not None and panel.high is not None:
        drawn.append(element("path", d=_area(panel.low, panel.high, start, plot), style=BAND))
    drawn.append(element("path", d=_line(panel.past, 0, plot), style=PAST))
    joined = [*panel.past[-1:], *panel.forecast]  # begins where the past ends
    first = start - len(panel.past[-1:])
    drawn.append(element("path", d=_line(joined, first, plot), style=FORECAST))
    drawn += _tips(panel, plot)
    picture = element(
        "svg", *drawn, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=panel.title
    )
    return element("figcaption", panel.title, class_="name"), picture


def _plot(panel: Panel) -> Plot:
    lists = (panel.past, panel.forecast, panel.low or (), panel.high or ())
    known = [value for values in lists for value in values if math.isfinite(value)]
    low, high = min(known), max(known)
    room = (high - low) * 0.05 or abs(low) * 0.05 or 1.0
    return Plot(len(panel.past) + len(panel.forecast), low - room, high + room)


def _line(values: Sequence[float], first: int, plot: Plot) -> str:
    """Return a path through the known values, with a gap where one is missing."""
    words, letter = [], "M"
    for index, value in enumerate(values):
        if not math.isfinite(value):
            letter = "M"
            continue
        words.append(f"{letter}{plot.x(first + index):.1f} {plot.y(value):.1f}")
        letter = "L"
    return "".join(words)


def _area(low: Sequence[float], high: Sequence[float], first: int, plot: Plot) -> str:
    there = [f"{plot.x(first + i):.1f} {plot.y(v):.1f}" for i, v in enumerate(low)]
    back = [f"{plot.x(first + i):.1f} {plot.y(v):.1f}" for i, v in enumerate(high)]
    return f"M{'L'.join([*there, *reversed(back)])}Z"


def _scale(plot: Plot) -> list[Html]:
    """Draw the lines of the scale with their values."""
    step = nice_step(plot.high - plot.low)
    drawn = []
    for number in range(math.ceil(plot.low / step), math.floor(plot.high / step) + 1):
        y = plot.y(number * step)
        drawn.append(element("line", x1=LEFT, x2=RIGHT, y1=y, y2=y, class_="grid"))
        words = f"{number * step:.6g}"
        drawn.append(element("text", words, x=LEFT - 6, y=y + 4, text_anchor="end"))
    return drawn


def _times(panel: Panel, plot: Plot) -> list[Html]:
    """Draw the border of the forecast, and three times below."""
    start = plot.x(len(panel.past))
    drawn = [element("line", x1=start, x2=start, y1=TOP, y2=FLOOR, style=NOW)]
    marks: list[tuple[float, str, str]] = [
        (LEFT, "start", panel.before),
        (RIGHT, "end", panel.end_time),
    ]
    # It stands before its line, where it cannot lie on the last one; and not on the first one.
    if start > LEFT + TEXT_WIDTH * (len(panel.before) + len(panel.start_time) + 2):
        marks.append((start, "end", panel.start_time))
    drawn += [element("text", t, x=x, y=HEIGHT - 8, text_anchor=a) for x, a, t in marks]
    return drawn


def _tips(panel: Panel, plot: Plot) -> list[Html]:
    """Lay invisible boxes over the forecast that tell its values."""
    count, first = len(panel.forecast), len(panel.past)
    step = -(-count // MAX_TIPS)
    width = plot.x(step) - plot.x(0)
    drawn = []
    for index in range(0, count, step):
        tip = f"forecast point {index + 1}: {cell_text(float(panel.forecast[index]))}"
        if panel.low is not None and panel.high is not None:
            low, high = cell_text(float(panel.low[index])), cell_text(float(panel.high[index]))
            tip += f"\n{panel.band}: {low} to {high}"
        x = plot.x(first + index) - width / 2
        box = {"x": x, "y": TOP, "width": width, "height": FLOOR - TOP}
        drawn.append(element("rect", **box, data_tip=tip, style="fill:transparent"))
    return drawn


def _legend(panels: Sequence[Panel]) -> Html:
    names = {"past": "var(--soft)", "forecast": "var(--accent)"}
    band = next((panel.band for panel in panels if panel.band), "")
    if band:
        names[band] = "color-mix(in srgb,var(--accent) 18%,transparent)"
    words = [
        element("span", element("i", class_="swatch", style=f"background:{colour}"), name)
        for name, colour in names.items()
    ]
    return element("div", *words, class_="legend")
