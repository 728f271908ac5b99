"""An evaluation drawn: ratios to seasonal naive, and the first window of every group.

As one self-contained page with both tables, or by matplotlib to a .png file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from steplab.core.output_file import write_output
from steplab.core.table import cell_text
from steplab.forecasting.evaluation.evaluate import Evaluation, EvaluationResult, Example
from steplab.forecasting.evaluation.tables import label, metrics_table, ratios_table, verdict
from steplab.report.charts.plot import LogScale, check_plot, png_bytes, png_figure, png_text
from steplab.report.charts.series import SeriesPanel, draw_series, series_html
from steplab.report.markup import Html, element, join
from steplab.report.pages.document import Section, paragraphs, table_html, tiles, write_page

PICTURE_SUFFIXES = (".html", ".png")
METRIC = "MASE"
HORIZONS_OF_PAST = 2  # drawn of what the model saw, if it saw as much
LANE_COLUMNS = "grid-template-columns:minmax(120px,290px) 60px 1fr"
BETTER, WORSE = "#1f8a43", "#c93c37"
MAX_PNG_PANELS = 10
PANEL_INCHES = (5.6, 1.9)


def write_picture(result: EvaluationResult, path: Path) -> None:
    """Draw to the format that the file's suffix names."""
    check_plot(path, PICTURE_SUFFIXES)
    write = _write_png if path.suffix.lower() == ".png" else _write_page
    write(result, path)


def window_panel(example: Example) -> SeriesPanel:
    """Return the panel of one window: what was before it, what came, and both forecasts."""
    window, quantiles_HQ = example.window, example.forecast.quantiles_HQ
    horizon = len(window.truth_H)
    past = window.context[-HORIZONS_OF_PAST * horizon :]
    start = len(past)
    lines = {
        "past": (0, past.tolist()),
        "truth": (start, window.truth_H.tolist()),
        "seasonal naive": (start, window.naive_H.tolist()),
        "model": (start, example.forecast.point_H.tolist()),
    }
    band, name, levels = None, "", example.forecast.levels
    if quantiles_HQ is not None:
        band = (quantiles_HQ[:, 0].tolist(), quantiles_HQ[:, -1].tolist())
        name = f"quantiles {levels[0]:g} to {levels[-1]:g}"
    title = f"{window.group}, series {window.series}"
    return SeriesPanel(title, start, start + horizon, lines, band, name)


def ratio_rows(found: Evaluation) -> list[tuple[str, float]]:
    """Return (name, ratio) of every group, then of every summary in both ways."""
    rows = [(label(group), group.ratio(METRIC)) for group in found.groups]
    for one in found.summaries:
        rows.append((f"{one.name}: plain mean", one.ratio(METRIC)))
        rows.append((f"{one.name}: geometric mean", one.geometric[METRIC]))
    return rows


def _write_page(result: EvaluationResult, path: Path) -> None:
    found = result.evaluation
    one, metrics, ratios = found.overall, metrics_table(found), ratios_table(found)
    figures = {
        "MASE over all windows": cell_text(one.model.mase),
        "of seasonal naive": cell_text(one.naive.mase),
        "geometric mean of the groups' ratios": cell_text(one.geometric["MASE"]),
        "groups in which the model is better": f"{one.won['MASE']} of {one.groups}",
    }
    panels = [window_panel(example) for example in result.examples]
    sections = [
        Section("ratios", "MASE against seasonal naive", _ratios_html(found), verdict(found)),
        Section("windows", "The first window of every group", series_html(panels)),
        Section("metrics", "Metrics", table_html(metrics)),
        Section("all-ratios", ratios.title.capitalize(), table_html(ratios)),
    ]
    foot = paragraphs([line for line in (metrics.title, found.conditions) if line])
    title = f"Evaluation of {found.model}"
    write_page(path, title, tiles(figures), sections, foot, "--picture")


def ratio_scale(ratios: Sequence[float]) -> LogScale:
    """Return an axis of powers of two that holds all ratios and has 1 inside, without 0 and NaN."""
    return LogScale.whole_powers([0.9, 1.1, *(ratio for ratio in ratios if ratio > 0)], 2, 0, 100)


def ratio_position(ratio: float, scale: LogScale) -> str:
    """Return the position of a ratio in percent; 0 is at the left end."""
    return scale.percent(ratio or scale.low)


def _ratios_html(found: Evaluation) -> Html:
    """Return one lane per row over an axis of powers of two, green where the model is better."""
    rows = ratio_rows(found)
    scale = ratio_scale([ratio for _, ratio in rows])
    return join([*(_lane(name, ratio, scale) for name, ratio in rows), _ticks(scale)])


def _lane(name: str, ratio: float, scale: LogScale) -> Html:
    one = scale.percent(1.0)
    drawn = [element("line", x1=one, x2=one, y1="0", y2="22", class_="median")]
    value = "undefined" if math.isnan(ratio) else f"{ratio:.3f}"
    if not math.isnan(ratio):
        color, x = "var(--good)" if ratio < 1 else "var(--bad)", ratio_position(ratio, scale)
        style = f"stroke:{color};stroke-width:2"
        drawn.append(element("line", x1=one, x2=x, y1="11", y2="11", style=style))
        dot = element(
            "circle", cx=x, cy="11", r=5, style=f"fill:{color}", data_tip=f"{name}: {value}"
        )
        drawn.append(dot)
    picture = element("svg", *drawn, role="img", aria_label=f"{name}: {value}")
    return _row(element("div", name, class_="label", title=name), value, picture)


def _ticks(scale: LogScale) -> Html:
    marks = []
    for value in scale.powers(2):
        x = scale.percent(value)
        marks.append(element("line", x1=x, x2=x, y1="0", y2="4", class_="grid"))
        marks.append(element("text", f"{value:g}", x=x, y="14", text_anchor="middle"))
    title = element("div", f"{METRIC}: model / seasonal naive", class_="label")
    return _row(title, "", element("svg", *marks, class_="axis"))


def _row(title: Html, value: str, picture: Html) -> Html:
    cell = element("div", value, class_="label")
    return element("div", title, cell, picture, class_="lane", style=LANE_COLUMNS)


def _write_png(result: EvaluationResult, path: Path) -> None:
    """Draw the ratios above, and the first window of some groups below, two in a row."""
    ratios = ratio_rows(result.evaluation)
    panels = [window_panel(example) for example in result.examples[:MAX_PNG_PANELS]]
    rows = math.ceil(len(panels) / 2)
    heights = [0.25 * len(ratios) + 0.8, PANEL_INCHES[1] * rows]
    figure = png_figure(2 * PANEL_INCHES[0], sum(heights))
    above, below = figure.subfigures(2, 1, height_ratios=heights)
    _draw_ratios(above.subplots(), ratios)
    draw_series(below, panels, "outside upper center")
    write_output(path, png_bytes(figure), "--picture")


def _draw_ratios(axes: Any, rows: list[tuple[str, float]]) -> None:
    for row, (_, ratio) in enumerate(rows):
        if ratio > 0:
            color = BETTER if ratio < 1 else WORSE
            axes.plot([1, ratio], [row, row], color=color, lw=1.5)
            axes.plot([ratio], [row], "o", color=color)
            text = {"textcoords": "offset points", "fontsize": 7}
            axes.annotate(f"{ratio:.2f}", (ratio, row), (6, 4), **text)
    axes.axvline(1, color="#1c2128", lw=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_yticks(range(len(rows)), [png_text(name) for name, _ in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_title(f"{METRIC}: model / seasonal naive", fontsize=9, loc="left")
    axes.grid(axis="x", lw=0.4)
