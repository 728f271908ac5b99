"""An evaluation as one self-contained page: ratios, a window of every group, both tables."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from steplab.core.table import cell_text
from steplab.forecasting.evaluation.evaluate import Evaluation, EvaluationResult
from steplab.forecasting.evaluation.panels import panels_html
from steplab.forecasting.evaluation.tables import label, metrics_table, ratios_table, verdict
from steplab.report.markup import Html, element, join
from steplab.report.pages.document import Section, paragraphs, table_html, tiles, write_page

COLUMNS = "grid-template-columns:minmax(120px,290px) 60px 1fr"
METRIC = "MASE"


@dataclass(frozen=True)
class Axis:
    """Powers of two from 2 ** low to 2 ** high."""

    low: int
    high: int

    @classmethod
    def over(cls, ratios: list[float]) -> Axis:
        """Return the axis that holds all ratios and has 1 inside; 0 and NaN are not on it."""
        known = [ratio for ratio in ratios if ratio > 0]
        smallest, largest = min([*known, 0.9]), max([*known, 1.1])
        return cls(math.floor(math.log2(smallest)), math.ceil(math.log2(largest)))

    def at(self, ratio: float) -> str:
        """Return the place of a ratio; 0 is at the left end."""
        share = (math.log2(ratio) - self.low) / (self.high - self.low) if ratio > 0 else 0.0
        return f"{share * 100:.2f}%"


def rows_of(found: Evaluation) -> list[tuple[str, float]]:
    """Return (name, ratio) of every group, then of every summary in both ways."""
    rows = [(label(group), group.ratio(METRIC)) for group in found.groups]
    for one in found.summaries:
        rows.append((f"{one.name}: plain mean", one.ratio(METRIC)))
        rows.append((f"{one.name}: geometric mean", one.geometric[METRIC]))
    return rows


def ratios_html(found: Evaluation) -> Html:
    """Return one lane per row, green where the model is better."""
    rows = rows_of(found)
    axis = Axis.over([ratio for _, ratio in rows])
    return join([*(_lane(name, ratio, axis) for name, ratio in rows), _ticks(axis)])


def _lane(name: str, ratio: float, axis: Axis) -> Html:
    one = axis.at(1.0)
    drawn = [element("line", x1=one, x2=one, y1="0", y2="22", class_="median")]
    words = "undefined" if math.isnan(ratio) else f"{ratio:.3f}"
    if not math.isnan(ratio):
        colour, x = "var(--good)" if ratio < 1 else "var(--bad)", axis.at(ratio)
        style = f"stroke:{colour};stroke-width:2"
        drawn.append(element("line", x1=one, x2=x, y1="11", y2="11", style=style))
        drawn.append(
            element(
                "circle", cx=x, cy="11", r=5, style=f"fill:{colour}", data_tip=f"{name}: {words}"
            )
        )
    picture = element("svg", *drawn, role="img", aria_label=f"{name}: {words}")
    return _row(element("div", name, class_="label", title=name), words, picture)


def _ticks(axis: Axis) -> Html:
    marks = []
    for power in range(axis.low, axis.high + 1):
        x = axis.at(2.0**power)
        marks.append(element("line", x1=x, x2=x, y1="0", y2="4", class_="grid"))
        marks.append(element("text", f"{2.0**power:g}", x=x, y="14", text_anchor="middle"))
    title = element("div", f"{METRIC}: model / seasonal naive", class_="label")
    return _row(title, "", element("svg", *marks, class_="axis"))


def _row(title: Html, words: str, picture: Html) -> Html:
    value = element("div", words, class_="label")
    return element("div", title, value, picture, class_="lane", style=COLUMNS)


def write_evaluation_page(outcome: EvaluationResult, path: Path) -> None:
    """Write a page that needs nothing but itself."""
    found = outcome.evaluation
    one, metrics, ratios = found.overall, metrics_table(found), ratios_table(found)
    figures = {
        "MASE over all windows": cell_text(one.model.mase),
        "of seasonal naive": cell_text(one.naive.mase),
        "geometric mean of the groups' ratios": cell_text(one.geometric["MASE"]),
        "groups in which the model is better": f"{one.won['MASE']} of {one.groups}",
    }
    sections = [
        Section("ratios", "MASE against seasonal naive", ratios_html(found), verdict(found)),
        Section("windows", "The first window of every group", panels_html(outcome.examples)),
        Section("metrics", "Metrics", table_html(metrics)),
        Section("all-ratios", ratios.title.capitalize(), table_html(ratios)),
    ]
    foot = paragraphs([line for line in (metrics.title, found.conditions) if line])
    write_page(path, f"Evaluation of {found.model}", tiles(figures), sections, foot)
