"""What people see of forecasts: a short table and a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from steplab.core import Column, Table
from steplab.core.table import Cell
from steplab.data.time_step import format_time
from steplab.forecasting.histories import Histories
from steplab.forecasting.panels import MAX_PANELS, Panel, Picture, drawn_past
from steplab.forecasting.prediction import Prediction

if TYPE_CHECKING:
    from steplab.forecasting.forecaster import Forecaster

MAX_ROWS = 10
HANDED_ON = (
    "Beyond its longest head, the model goes on from its own point forecasts, so a band is too "
    "narrow there."
)


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
        "\n".join([*lines, model_line(forecaster, prediction)]),
    )


def forecast_picture(
    forecaster: Forecaster, histories: Histories, prediction: Prediction
) -> Picture:
    """Return the first series with the end of their past and the widest band."""
    count = min(MAX_PANELS, len(histories))
    lines = [f"The first {count:,} of {len(histories):,} series."] if count < len(histories) else []
    longest = max(forecaster.model.config.horizon_lengths)
    if prediction.quantiles_BHQ is not None and prediction.horizon > longest:
        lines.append(HANDED_ON)
    return Picture(
        f"Forecasts of {prediction.horizon:,} points: {histories.name}",
        "\n".join(lines),
        tuple(_panel(histories, prediction, index) for index in range(count)),
        (model_line(forecaster, prediction),),
    )


def model_line(forecaster: Forecaster, prediction: Prediction) -> str:
    """Say which model it was and what it predicts."""
    if prediction.quantiles_BHQ is None:
        kind = "a point model: no quantiles"
    else:
        kind = f"quantiles {', '.join(f'{level:g}' for level in prediction.levels)}"
    return f"{forecaster.name}, {kind}"


def _panel(histories: Histories, prediction: Prediction, index: int) -> Panel:
    times = histories.future(index, prediction.horizon)
    low = high = None
    band = ""
    if prediction.quantiles_BHQ is not None and len(prediction.levels) > 1:
        low = prediction.quantiles_BHQ[index, :, 0].tolist()
        high = prediction.quantiles_BHQ[index, :, -1].tolist()
        band = f"quantiles {prediction.levels[0]:g} to {prediction.levels[-1]:g}"
    return Panel(
        str(histories.ids[index]),
        histories.values[index][-drawn_past(prediction.horizon) :].tolist(),
        prediction.mean_BH[index].tolist(),
        format_time(times[0]),
        format_time(times[-1]),
        low,
        high,
        band,
    )
