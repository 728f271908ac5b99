"""An evaluation as a .png file, by matplotlib."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

from steplab.forecasting.evaluation.evaluate import EvaluationResult
from steplab.forecasting.evaluation.page import METRIC, rows_of
from steplab.forecasting.evaluation.panels import LINES, Panel, panel_of
from steplab.store.atomic import disk_errors, write_file

BETTER, WORSE = "#1f8a43", "#c93c37"
MAX_PANELS = 10
PANEL_INCHES = (5.6, 1.9)


def write_evaluation_figure(outcome: EvaluationResult, path: Path) -> None:
    """Draw the ratios above, and the first window of some groups below, two in a row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ratios = rows_of(outcome.evaluation)
    panels = [panel_of(example) for example in outcome.examples[:MAX_PANELS]]
    rows = math.ceil(len(panels) / 2)
    heights = [0.25 * len(ratios) + 0.8, PANEL_INCHES[1] * rows]
    # A figure of its own: pyplot's are shared with whatever else runs in the process.
    figure = Figure(figsize=(2 * PANEL_INCHES[0], sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    above_below: Any = figure.subfigures(2, 1, height_ratios=heights)
    _draw_ratios(above_below[0].subplots(), ratios)
    axes = above_below[1].subplots(rows, 2, squeeze=False).ravel()
    for one, panel in zip(axes, panels, strict=False):
        _draw_panel(one, panel)
    handles, names = axes[0].get_legend_handles_labels()
    above_below[1].legend(handles, names, loc="outside upper center", ncols=4, fontsize=7)
    for unused in axes[len(panels) :]:
        unused.set_visible(False)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110)
    with disk_errors(path.parent, "--picture"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, data.getvalue())


def _draw_ratios(axes: Any, rows: list[tuple[str, float]]) -> None:
    for place, (_, ratio) in enumerate(rows):
        if ratio > 0:
            colour = BETTER if ratio < 1 else WORSE
            axes.plot([1, ratio], [place, place], color=colour, lw=1.5)
            axes.plot([ratio], [place], "o", color=colour)
            text = {"textcoords": "offset points", "fontsize": 7}
            axes.annotate(f"{ratio:.2f}", (ratio, place), (6, 4), **text)
    axes.axvline(1, color="#1c2128", lw=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_yticks(range(len(rows)), [_literal(name) for name, _ in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_title(f"{METRIC}: model / seasonal naive", fontsize=9, loc="left")
    axes.grid(axis="x", lw=0.4)


def _draw_panel(axes: Any, panel: Panel) -> None:
    for name, (first, values) in panel.lines.items():
        _, colour, width = LINES[name]
        axes.plot(range(first, first + len(values)), values, color=colour, lw=width, label=name)
    if panel.band is not None:
        ahead = range(panel.start, panel.start + len(panel.band[0]))
        axes.fill_between(ahead, *panel.band, color=LINES["model"][1], alpha=0.16, lw=0)
    axes.set_title(_literal(panel.title), fontsize=8, loc="left")
    axes.tick_params(labelsize=7)


def _literal(text: str) -> str:
    """Return text in which a dollar sign does not begin a formula."""
    return text.replace("$", r"\$")
