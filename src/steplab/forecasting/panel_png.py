"""Forecasts as a .png file, by matplotlib."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

from steplab.forecasting.panels import Panel, Picture
from steplab.store.atomic import disk_errors, write_file

PANEL_INCHES = (5.6, 2.4)
PAST, FORECAST = "#5d6675", "#2f57bd"


def write_png(picture: Picture, path: Path) -> None:
    """Draw one panel per series, two in a row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(2, len(picture.panels))
    rows = math.ceil(len(picture.panels) / columns)
    size = (PANEL_INCHES[0] * columns, PANEL_INCHES[1] * rows + 0.8)
    # A figure of its own: pyplot's are shared with whatever else runs in the process.
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_literal(picture.title), fontsize=11)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for one, panel in zip(axes, picture.panels, strict=False):
        _draw(one, panel)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    for unused in axes[len(picture.panels) :]:
        unused.set_visible(False)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110)
    with disk_errors(path.parent, "--picture"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, data.getvalue())


def _draw(axes: Any, panel: Panel) -> None:
    start, count = len(panel.past), len(panel.forecast)
    ahead = range(start, start + count)
    if panel.low is not None and panel.high is not None:
        axes.fill_between(
            ahead, panel.low, panel.high, color=FORECAST, alpha=0.18, lw=0, label=panel.band
        )
    axes.plot(range(start), panel.past, color=PAST, lw=1, label="past")
    joined = range(start - len(panel.past[-1:]), start + count)
    values = [*panel.past[-1:], *panel.forecast]
    axes.plot(joined, values, color=FORECAST, lw=1.6, label="forecast")
    axes.axvline(start, color=PAST, lw=0.8, ls=":")
    axes.set_title(_literal(panel.title), fontsize=9, loc="left")
    times = (panel.before, panel.start_time, panel.end_time)
    axes.set_xticks([0, start, start + count - 1], [_literal(t) for t in times], fontsize=7)
    for label, side in zip(axes.get_xticklabels(), ("left", "right", "right"), strict=True):
        label.set_horizontalalignment(side)
    axes.tick_params(axis="y", labelsize=7)


def _literal(text: str) -> str:
    """Return text in which a dollar sign does not begin a formula."""
    return text.replace("$", r"\$")
