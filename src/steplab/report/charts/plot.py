"""What charts are made of: scales and ticks, paths, lanes and legends, SVG and PNG files."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from steplab.core.errors import Unsupported, UserError
from steplab.report.markup import Html, element, join

# Of Okabe and Ito, which color-blind people can tell apart too.
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8c8c8c", "#b8a800")
LETTER_WIDTH = 6.6  # px, about that of a 12 px letter
LANE_HEIGHT = 22  # px, as in style.css
# Style of a standalone file, light or dark with the reader's system.
STYLE = """
.steplab-chart { --paper: #ffffff; --ink: #1f2328; --faint: #d8dee4; --band: #f3f5f7; }
@media (prefers-color-scheme: dark) {
  .steplab-chart { --paper: #16181d; --ink: #e6e8eb; --faint: #3a3f47; --band: #1f232a; }
}
.steplab-chart text { fill: var(--ink); font: 12px system-ui, sans-serif; }
.steplab-chart .strong { font-weight: 600; }
.steplab-chart .paper { fill: var(--paper); }
.steplab-chart .band { fill: var(--band); }
.steplab-chart .grid { stroke: var(--faint); }
.steplab-chart .mark { stroke: var(--ink); stroke-dasharray: 4 3; }
.steplab-chart .dot { fill: var(--ink); stroke: var(--paper); }
"""


def nice_step(length: float, most: int = 6) -> float:
    """Return 1, 2 or 5 times a power of ten so that `most` steps or fewer fit into `length`."""
    if length <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(length / most))
    return next(power * n for n in (1, 2, 5, 10) if length <= power * n * most * (1 + 1e-9))


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high`, drawn from `begin` to `end` (px, or percent of a lane)."""

    low: float
    high: float
    begin: float = 0.0
    end: float = 100.0

    @classmethod
    def around(cls, values: Iterable[float], begin: float = 0.0, end: float = 100.0) -> Scale:
        """Return a scale that holds all finite values, with a twentieth free at both ends."""
        known = [value for value in values if math.isfinite(value)]
        low, high = min(known), max(known)
        room = (high - low) * 0.05 or abs(low) * 0.05 or 1.0
        return cls(low - room, high + room, begin, end)

    def at(self, value: float) -> float:
        """Return where `value` is drawn."""
        return self.begin + (self.end - self.begin) * self._share(value)

    def percent(self, value: float) -> str:
        """Return where `value` is drawn in a lane of any width: `12.50%`."""
        return f"{self.at(value):.2f}%"

    def ticks(self, most: int = 6) -> list[float]:
        """Return round values inside the axis, about `most` of them."""
        step = nice_step(self.high - self.low, most)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [round(number * step, 12) for number in range(first, last + 1)]

    def _share(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class LogScale(Scale):
    """A logarithmic axis; `low` and `high` are above 0."""

    @classmethod
    def around(cls, values: Iterable[float], begin: float = 0.0, end: float = 100.0) -> LogScale:
        """Return a scale that holds all values, with a factor of 1.3 free at both ends."""
        known = list(values)
        return cls(min(known) / 1.3, max(known) * 1.3, begin, end)

    @classmethod
    def whole_powers(cls, values: Iterable[float], base: int, begin: float, end: float) -> LogScale:
        """Return a scale that begins and ends at a power of `base`."""
        known = list(values)
        # Rounded: math.log(1000, 10) is 2.9999999999999996.
        powers = [round(math.log(value, base), 9) for value in (min(known), max(known))]
        low, high = math.floor(powers[0]), math.ceil(powers[1])
        return cls(float(base) ** low, float(base) ** max(high, low + 1), begin, end)

    def ticks(self, most: int = 6) -> list[float]:
        """Return 1, 2 and 5 times powers of ten; the powers alone over `most` or more of them."""
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        steps = (1,) if len(powers) >= most else (1, 2, 5)
        ticks = [step * 10.0**power for power in powers for step in steps]
        return [tick for tick in ticks if self.low <= tick <= self.high]

    def powers(self, base: int) -> list[float]:
        """Return the powers of `base` from end to end."""
        first, last = round(math.log(self.low, base)), round(math.log(self.high, base))
        return [float(base) ** power for power in range(first, last + 1)]

    def _share(self, value: float) -> float:
        return math.log(value / self.low) / math.log(self.high / self.low)


Point = tuple[float, float]  # px


def line_path(points: Iterable[Point]) -> str:
    """Return the `d` of a line through the points, with a gap where one is not finite."""
    words, letter = [], "M"
    for x, y in points:
        if math.isfinite(y):
            words.append(f"{letter}{x:.1f} {y:.1f}")
        letter = "L" if math.isfinite(y) else "M"
    return "".join(words)


def area_path(below: Iterable[Point], above: Iterable[Point]) -> str:
    """Return the `d` of the area between two lines."""
    around = [*below, *reversed([*above])]
    return f"M{'L'.join(f'{x:.1f} {y:.1f}' for x, y in around)}Z"


def text(x: float, y: float, words: str, anchor: str = "start", style: str | None = None) -> Html:
    """Return a text of a chart; `anchor` says which end of it is at x."""
    return element("text", words, x=round(x, 1), y=round(y, 1), text_anchor=anchor, class_=style)


def grid_line(x1: float, y1: float, x2: float, y2: float, style: str = "grid") -> Html:
    """Return a straight line in one of the styles of STYLE."""
    ends = {"x1": round(x1, 1), "y1": round(y1, 1), "x2": round(x2, 1), "y2": round(y2, 1)}
    return element("line", class_=style, **ends)


def swatch(x: float, y: float, color: str, name: str) -> Html:
    """Return a colored square and the name beside it, standing on the line at `y`."""
    square = element("rect", x=round(x), y=y - 10, width=12, height=12, fill=color)
    return join([square, text(x + 17, y, name)])


def svg_file(width: float, height: float, label: str, parts: Iterable[Html]) -> str:
    """Return a standalone picture; screen readers read `label`."""
    paper = element("rect", class_="paper", width=width, height=height)
    drawn = element(
        "svg",
        element("style", Html(STYLE)),
        paper,
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        class_="steplab-chart",
        role="img",
        viewBox=f"0 0 {width:g} {height:g}",
        aria_label=label,
    )
    return f"{drawn}\n"


def lane(
    label: str,
    marks: Sequence[Html],
    style: str | None = None,
    aria_label: str = "",
    tip: str = "",
) -> Html:
    """Return one row of a page's chart: a label and marks placed in percent of the width.

    Screen readers read `aria_label` in place of the label; the mouse over it shows `tip`.
    """
    name = element("div", label, class_="label", data_tip=tip or label)
    picture = element("svg", *marks, class_=style, role="img", aria_label=aria_label or label)
    return element("div", name, picture, class_="lane")


def axis_lane(scale: Scale, unit: str = "ms", sign: str = "") -> Html:
    """Return the axis under lanes: a mark and a number at round values; `sign` "+" for changes."""
    marks = []
    for value in scale.ticks():
        x = scale.percent(value)
        words = f"{value:{sign}g}" if value else "0"
        marks.append(element("line", x1=x, x2=x, y1="0", y2="4", class_="grid"))
        marks.append(element("text", words, x=x, y="14", text_anchor="middle"))
    picture = element("svg", *marks, class_="axis")
    return element("div", element("div", unit, class_="label"), picture, class_="lane")


def legend(names: Iterable[tuple[str, str]], *more: Html) -> Html:
    """Return a page's legend of (name, CSS color or class); what begins with `.` is a class."""
    words = []
    for name, look in names:
        named = {"class_": f"swatch {look[1:]}"} if look.startswith(".") else {"class_": "swatch"}
        style = None if look.startswith(".") else f"background:{look}"
        words.append(element("span", element("i", **named, style=style), name))
    return element("div", *words, *more, class_="legend")


def check_plot(path: Path, suffixes: Sequence[str] = (".svg", ".png")) -> None:
    """Refuse a picture that cannot be drawn, before anything is measured for it.

    The first of `suffixes` is the format that needs no matplotlib.
    """
    if path.suffix.lower() not in suffixes:
        raise UserError(f"Cannot draw to {path}.", f"Use {' or '.join(suffixes)}.")
    if path.suffix.lower() == ".png" and find_spec("matplotlib") is None:
        raise Unsupported(
            f"To draw {path}, matplotlib must be installed.",
            f"pip install 'steplab[plots]', or name it {suffixes[0]}, which needs nothing.",
        )


def png_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure, in inches.

    A figure of its own: pyplot's are shared with whatever else runs in the process.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def png_panels(figure: Any, count: int, columns: int = 2) -> list[Any]:
    """Return the axes of `count` panels, `columns` in a row; the rest of the last row is hidden."""
    columns = min(columns, count)
    axes = figure.subplots(math.ceil(count / columns), columns, squeeze=False).ravel()
    for unused in axes[count:]:
        unused.set_visible(False)
    return list(axes[:count])


def png_bytes(figure: Any) -> bytes:
    """Return the figure as the content of a .png file."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110)
    return data.getvalue()


def png_text(words: str) -> str:
    """Return words in which a dollar sign does not begin a formula."""
    return words.replace("$", r"\$")
