"""Forecasts as a long table, one row per series and time, with the column names of the input.

`unique_id, ds`: the point forecast is `steplab`, quantiles are `steplab-lo-80`, `steplab-median`,
`steplab-hi-80`. Any other names: `target_name`, `predictions`, and quantiles `0.1`, `0.9`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from steplab.core.errors import UserError
from steplab.core.output_file import write_output
from steplab.data.formats.frames import SCHEMES, Columns, require_pandas, write_frame
from steplab.forecasting.histories import Histories
from steplab.forecasting.prediction import Prediction
from steplab.report.export import csv_line

MODEL = "steplab"
SUFFIXES = (".csv", ".parquet", ".json")


def long_table(histories: Histories, prediction: Prediction) -> dict[str, Any]:
    """Return the columns: ids, times, point forecasts, quantiles; one row per series and time."""
    columns, horizon = histories.columns, prediction.horizon
    table: dict[str, Any] = {
        columns.id: [name for name in histories.ids for _ in range(horizon)],
        columns.time: np.concatenate(
            [histories.future(index, horizon) for index in range(len(histories))]
        ),
    }
    if columns.id != SCHEMES[0].id:
        table["target_name"] = [columns.value] * len(table[columns.id])
    table[point_name(columns)] = prediction.mean_BH.ravel()
    if prediction.quantiles_BHQ is not None:
        for index, level in enumerate(prediction.levels):
            table[level_name(columns, level)] = prediction.quantiles_BHQ[..., index].ravel()
    return table


def point_name(columns: Columns) -> str:
    """Return the name of the column of point forecasts."""
    return MODEL if columns.id == SCHEMES[0].id else "predictions"


def level_name(columns: Columns, level: float) -> str:
    """Return the name of the column of one quantile."""
    if columns.id != SCHEMES[0].id:
        return f"{level:g}"
    if level == 0.5:
        return f"{MODEL}-median"
    return f"{MODEL}-{'lo' if level < 0.5 else 'hi'}-{abs(200 * level - 100):.6g}"


def check_suffix(path: Path) -> None:
    """Refuse a file of an unknown format before anything is computed for it."""
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"Cannot write forecasts to {path}.", f"Use {', '.join(SUFFIXES)}.")
    if path.suffix.lower() == ".parquet":
        require_pandas(f"To write {path}")


def write_forecasts(
    path: Path, histories: Histories, prediction: Prediction, checkpoint: str
) -> None:
    """Write forecasts in the format that the file's suffix names, complete or not at all."""
    check_suffix(path)
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        import pandas as pd

        table = pd.DataFrame(long_table(histories, prediction))
        write_frame(table, path, "--out")
    elif suffix == ".json":
        write_output(path, _json(histories, prediction, checkpoint).encode())
    else:
        write_output(path, _csv(histories, prediction).encode())


def _csv(histories: Histories, prediction: Prediction) -> str:
    table = long_table(histories, prediction)
    rows = zip(*(_plain(column) for column in table.values()), strict=True)
    return "".join(map(csv_line, (table, *rows)))


def _json(histories: Histories, prediction: Prediction, checkpoint: str) -> str:
    """One object per series: its id, times, point forecasts, and a list per quantile."""
    series = []
    for index, name in enumerate(histories.ids):
        times = _plain(histories.future(index, prediction.horizon))
        one = {"id": name, "times": times, "mean": prediction.mean_BH[index].tolist()}
        if prediction.quantiles_BHQ is not None:
            lists = prediction.quantiles_BHQ[index].T.tolist()
            one["quantiles"] = dict(zip(map(str, prediction.levels), lists, strict=True))
        series.append(one)
    head = {"checkpoint": checkpoint, "input": histories.name, "horizon": prediction.horizon}
    document = {**head, "point_model": prediction.quantiles_BHQ is None, "series": series}
    return json.dumps(document, allow_nan=False, default=str) + "\n"


def _plain(column: Any) -> list[Any]:
    """Return numbers and strings; times as ISO 8601, as short as their column allows."""
    if isinstance(column, np.ndarray):
        return list(
            np.datetime_as_string(column, "auto") if column.dtype.kind == "M" else column.tolist()
        )
    return list(column)
