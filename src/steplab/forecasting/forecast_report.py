"""How forecasts are shown: a short table, and a picture of the first series. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from steplab.core import Cell, Column, Table
from steplab.core.output_file import write_output
from steplab.data.time_step import format_time
from steplab.forecasting.histories import Histories
from steplab.forecasting.prediction import Prediction
from steplab.report.charts.plot import check_plot, png_bytes, png_figure, png_text
from steplab.report.charts.series import SeriesPanel, draw_series, series_html
from steplab.report.markup import NOTHING
from steplab.report.pages.document import Section, paragraphs, write_page

if TYPE_CHECKING:
    from steplab.forecasting.forecaster import Forecaster

PICTURE_SUFFIXES = (".html", ".png")
MAX_ROWS = 10
MAX_PANELS = 12
MIN_PAST = 64  # points drawn before the forecast, if there are as many
PANEL_INCHES = (5.6, 2.4)
FED_BACK = (
    "Beyond its longest head, the model continues from its own point forecasts, so a band is too "
    "narrow there."
)


@dataclass(frozen=True)
class Picture:
    """Panels with the text above and below them."""

    title: str
    note: str
    panels: tuple[SeriesPanel, ...]
    foot: tuple[str, ...] = ()


def forecast_table(forecaster: Forecaster, histories: Histories, prediction: Prediction) -> Table:
    """Return the first and the last forecast of the first series."""
    horizon = prediction.horizon
    rows: list[tuple[Cell, ...]] = []
    for index in range(min(MAX_ROWS, len(histories))):
        times = histories.future(index, horizon)
        own = prediction.mean_BH[index]
        known = histories.values[index]
        known = known[np.isfinite(known)]
        ends = [(format_time(times[i]), float(own[i])) for i in (0, -1)]
        rows.append((str(histories.ids[index]), float(known[-1]), *ends[0], *ends[1]))
    names = ("series", "last known", "first time", "forecast", "last time", "forecast")
    more = len(histories) - len(rows)
    lines = [f"and {more:,} more series"] if more > 0 else []
    return Table(
        f"{len(histories):,} series, {horizon:,} points ahead",
        tuple(Column(name) for name in names),
        tuple(rows),
        "\n".join([*lines, _model_line(forecaster, prediction)]),
    )


def forecast_picture(
    forecaster: Forecaster, histories: Histories, prediction: Prediction
) -> Picture:
    """Return the first series with the end of their past and the widest band."""
    count = min(MAX_PANELS, len(histories))
    lines = [f"The first {count:,} of {len(histories):,} series."] if count < len(histories) else []
    longest = max(forecaster.model.config.horizon_lengths)
    if prediction.quantiles_BHQ is not None and prediction.horizon > longest:
        lines.append(FED_BACK)
    return Picture(
        f"Forecasts of {prediction.horizon:,} points: {histories.name}",
        "\n".join(lines),
        tuple(_series_panel(histories, prediction, index) for index in range(count)),
        (_model_line(forecaster, prediction),),
    )


def write_picture(picture: Picture, path: Path) -> None:
    """Draw to the format that the file's suffix names: a self-contained page, or a .png."""
    check_plot(path, PICTURE_SUFFIXES)
    if path.suffix.lower() == ".png":
        columns, rows = min(2, len(picture.panels)), math.ceil(len(picture.panels) / 2)
        figure = png_figure(PANEL_INCHES[0] * columns, PANEL_INCHES[1] * rows + 0.8)
        figure.suptitle(png_text(picture.title), fontsize=11)
        draw_series(figure, picture.panels, "outside lower center")
        write_output(path, png_bytes(figure), "--picture")
        return
    section = Section("forecasts", "Forecasts", series_html(picture.panels), picture.note)
    foot = paragraphs(list(picture.foot))
    write_page(path, picture.title, NOTHING, [section], foot, "--picture")


def forecast_panel(
    title: str,
    past: Sequence[float],
    forecast: Sequence[float],
    times: tuple[str, str],
    band: tuple[Sequence[float], Sequence[float]] | None = None,
    band_name: str = "",
) -> SeriesPanel:
    """Return the panel of one series; `times` are those of the first and last forecast point.

    The line of the forecast begins at the last point of the past, so that the two meet.
    """
    last = past[-1:]
    return SeriesPanel(
        title,
        start=len(past),
        points=len(past) + len(forecast),
        lines={"past": (0, past), "forecast": (len(past) - len(last), [*last, *forecast])},
        band=band,
        band_name=band_name,
        marks=(f"{len(past):,} points before", *times),
    )


def past_to_draw(horizon: int) -> int:
    """Return how many points of the past are drawn beside a forecast of `horizon` points."""
    return max(MIN_PAST, 3 * horizon)


def _series_panel(histories: Histories, prediction: Prediction, index: int) -> SeriesPanel:
    times = histories.future(index, prediction.horizon)
    past = histories.values[index][-past_to_draw(prediction.horizon) :]
    band, name = None, ""
    if prediction.quantiles_BHQ is not None and len(prediction.levels) > 1:
        quantiles_HQ = prediction.quantiles_BHQ[index]
        band = (quantiles_HQ[:, 0].tolist(), quantiles_HQ[:, -1].tolist())
        name = f"quantiles {prediction.levels[0]:g} to {prediction.levels[-1]:g}"
    return forecast_panel(
        str(histories.ids[index]),
        past.tolist(),
        prediction.mean_BH[index].tolist(),
        (format_time(times[0]), format_time(times[-1])),
        band,
        name,
    )


def _model_line(forecaster: Forecaster, prediction: Prediction) -> str:
    """Return which model it was and what it predicts."""
    if prediction.quantiles_BHQ is None:
        kind = "a point model: no quantiles"
    else:
        kind = f"quantiles {', '.join(f'{level:g}' for level in prediction.levels)}"
    return f"{forecaster.name}, {kind}"
