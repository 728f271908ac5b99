"""A few windows drawn: what was before, what came, and both forecasts of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from steplab.forecasting.evaluation.evaluate import Example
from steplab.report.markup import Html, element, join

WIDTH, HEIGHT = 560, 200
LEFT, RIGHT, TOP, FLOOR = 4, 556, 8, 192
HORIZONS_OF_PAST = 2  # drawn of what the model saw, where it saw so much
GRID = "display:grid;grid-template-columns:repeat(auto-fill,minmax(min(420px,100%),1fr));gap:18px"
# Name -> (colour on the page, colour on paper, width).
LINES = {
    "past": ("var(--soft)", "#5d6675", 1.2),
    "truth": ("var(--ink)", "#1c2128", 1.6),
    "seasonal naive": ("#d98324", "#d98324", 1.2),
    "model": ("var(--accent)", "#2f57bd", 2.0),
}
BAND = "fill:var(--accent);fill-opacity:.16;stroke:none"


@dataclass(frozen=True)
class Panel:
    """Lines by name, each (number of its first point, values); NaN is a gap."""

    title: str
    lines: dict[str, tuple[int, Sequence[float]]]
    band: tuple[Sequence[float], Sequence[float]] | None  # lowest and highest quantile

    @property
    def start(self) -> int:
        """The number of the first forecast point."""
        return self.lines["truth"][0]


def panel_of(example: Example) -> Panel:
    """Return what is drawn of one window."""
    window, quantiles_HQ = example.window, example.forecast.quantiles_HQ
    past = window.context[-HORIZONS_OF_PAST * len(window.truth_H) :]
    start = len(past)
    lines = {
        "past": (0, past.tolist()),
        "truth": (start, window.truth_H.tolist()),
        "seasonal naive": (start, window.naive_H.tolist()),
        "model": (start, example.forecast.point_H.tolist()),
    }
    band = None
    if quantiles_HQ is not None:
        band = (quantiles_HQ[:, 0].tolist(), quantiles_HQ[:, -1].tolist())
    return Panel(f"{window.group}, series {window.series}", lines, band)


def panels_html(examples: Sequence[Example]) -> Html:
    """Return a legend and one small picture per example."""
    figures = [element("figure", *_figure(panel_of(one)), style="margin:0") for one in examples]
    return join([_legend(), element("div", *figures, style=GRID)])


def _figure(panel: Panel) -> tuple[Html, Html]:
    points = panel.start + len(panel.lines["truth"][1])
    lists = [values for _, values in panel.lines.values()] + list(panel.band or ())
    known = [value for values in lists for value in values if math.isfinite(value)]
    low, high = min(known), max(known)
    extent = (high - low) or 1.0

    def place(number: int, value: float) -> str:
        x = LEFT + (RIGHT - LEFT) * number / max(points - 1, 1)
        return f"{x:.1f} {FLOOR - (FLOOR - TOP) * (value - low) / extent:.1f}"

    drawn = []
    if panel.band is not None:
        there = [place(panel.start + i, v) for i, v in enumerate(panel.band[0])]
        back = [place(panel.start + i, v) for i, v in enumerate(panel.band[1])]
        drawn.append(element("path", d=f"M{'L'.join([*there, *reversed(back)])}Z", style=BAND))
    for name, (first, values) in panel.lines.items():
        colour, _, width = LINES[name]
        words, letter = [], "M"
        for index, value in enumerate(values):
            if math.isfinite(value):
                words.append(f"{letter}{place(first + index, value)}")
            letter = "L" if math.isfinite(value) else "M"
        style = f"fill:none;stroke:{colour};stroke-width:{width}"
        drawn.append(element("path", d="".join(words), style=style))
    box = f"0 0 {WIDTH} {HEIGHT}"
    picture = element("svg", *drawn, viewBox=box, role="img", aria_label=panel.title)
    return element("figcaption", panel.title, class_="name"), picture


def _legend() -> Html:
    words = [
        element("span", element("i", class_="swatch", style=f"background:{colour}"), name)
        for name, (colour, _, _) in LINES.items()
    ]
    return element("div", *words, class_="legend")
