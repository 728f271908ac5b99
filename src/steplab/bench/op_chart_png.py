"""A chart as a .png file, by matplotlib. No torch."""

from __future__ import annotations

import io
import math
from typing import Any

from steplab.bench.op_chart import Chart, ChartPanel
from steplab.core.table import cell_text

PANEL_INCHES = (5.6, 3.4)


def chart_png(chart: Chart) -> bytes:
    """Return the picture: one panel per shape, two in a row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(2, len(chart.panels))
    rows = math.ceil(len(chart.panels) / columns)
    size = (PANEL_INCHES[0] * columns, PANEL_INCHES[1] * rows + 0.9)
    # A figure of its own: pyplot's are shared with whatever else runs in the process.
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(chart.title, fontsize=8)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for one, panel in zip(axes, chart.panels, strict=False):
        if len(chart.xs) > 1:
            _lines(one, chart, panel)
        else:
            _bars(one, chart, panel)
        failed = "".join(f"\n{text}" for text in panel.failed)
        one.set_title(f"{panel.title}{failed}", fontsize=8, loc="left")
    for unused in axes[len(chart.panels) :]:
        unused.set_visible(False)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110)
    return data.getvalue()


def _lines(axes: Any, chart: Chart, panel: ChartPanel) -> None:
    for way, values in panel.lines.items():
        xs = sorted(values)
        ys = [values[x] for x in xs]
        axes.plot(xs, ys, color=chart.colour(way), marker="o", label=way)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(chart.xs, [f"{x:,}" for x in chart.xs], fontsize=7)
    axes.set_xlabel(chart.x_name, fontsize=8)
    axes.set_ylabel(chart.y_name, fontsize=8)
    axes.grid(alpha=0.3)
    if panel.lines:
        axes.legend(fontsize=7)


def _bars(axes: Any, chart: Chart, panel: ChartPanel) -> None:
    ways = list(panel.lines)
    values = [next(iter(panel.lines[way].values())) for way in ways]
    bars = axes.barh(ways, values, color=[chart.colour(way) for way in ways])
    axes.bar_label(bars, [cell_text(value) for value in values], fontsize=7, padding=3)
    axes.invert_yaxis()
    axes.tick_params(labelsize=7)
    where = f"{chart.x_name} {chart.xs[0]:,}; " if chart.xs else ""
    axes.set_xlabel(f"{where}{chart.y_name}", fontsize=8)
