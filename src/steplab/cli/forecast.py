"""Forecast series with a trained model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from steplab.cli.command import Command
from steplab.cli.flags import add_device_flag, file_to_write
from steplab.cli.step_flags import add_model_flag, add_recipe_flag
from steplab.core.errors import UserError
from steplab.core.output_file import keep_inputs
from steplab.data.formats import check_exists, resolve_path

if TYPE_CHECKING:
    from steplab.forecasting.forecaster import Forecaster
    from steplab.forecasting.histories import Histories
    from steplab.forecasting.prediction import Prediction


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    add = parser.add_argument
    about = ".csv or .parquet frame; .npy, .npz, .json or .jsonl arrays; a folder; shipped:NAME"
    add("input", metavar="INPUT", type=Path, help=about)
    add("--horizon", type=int, required=True, metavar="N", help="points to forecast")
    add("--checkpoint", type=Path, metavar="PATH",
        help="checkpoint, folder of checkpoints, or Time-MoE folder; default: the newest that "
        "`steplab train` wrote")  # fmt: skip
    add_model_flag(parser)
    add("--out", type=file_to_write("--out"), metavar="FILE",
        help="write all forecasts: .csv, .parquet or .json")  # fmt: skip
    add("--picture", type=file_to_write("--picture"), metavar="FILE",
        help="draw the first series: .html or .png")  # fmt: skip
    add("--quantiles", type=_levels, metavar="LEVELS",
        help="such as 0.1,0.5,0.9; default: all that the model has")  # fmt: skip
    add("--id-column", metavar="NAME", help="column of a frame that names its series")
    add("--timestamp-column", metavar="NAME", help="column of a frame with times or counts")
    add("--target", metavar="NAME", help="column of a frame with values")
    add("--freq", metavar="FREQ", help="pandas frequency, if times have no step to infer")
    add("--batch", type=int, default=256, metavar="N", help="series at a time")
    add("--head", choices=("largest", "next-larger"), default="largest",
        help="use heads no longer than what remains, or the next longer one, cut")  # fmt: skip
    add_recipe_flag(parser)
    add_device_flag(parser)


def _run(args: argparse.Namespace) -> int:
    _check(args)
    keep_inputs([args.input], filter(None, [args.out]))
    from steplab.forecasting.forecast_report import forecast_picture, write_picture
    from steplab.forecasting.forecaster import Forecaster
    from steplab.forecasting.histories import read_histories
    from steplab.forecasting.long_table import check_suffix, write_forecasts

    if args.out:
        check_suffix(args.out)
    forecaster = Forecaster.load(args.checkpoint, args.device, args.recipe, args.model, warn=_note)
    used = forecaster.passes(args.horizon, args.head)[0].context
    names = (args.id_column, args.timestamp_column, args.target)
    # One point more than is used, so that a cut is noticed.
    histories = read_histories(args.input, names, args.freq, used + 1)
    for note in histories.notes:
        _note(note)
    prediction = _predict(forecaster, histories, args)
    if args.out:
        write_forecasts(args.out, histories, prediction, forecaster.name)
    if args.picture:
        write_picture(forecast_picture(forecaster, histories, prediction), args.picture)
    _print_results(args, forecaster, histories, prediction)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse bad arguments before torch is imported and a model is loaded."""
    for name in ("horizon", "batch"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} must be at least 1, not {getattr(args, name)}.")
    from steplab.forecasting.prediction import check_horizon

    check_horizon(args.horizon)
    args.input = resolve_path(args.input)
    check_exists(args.input)
    from steplab.forecasting.forecast_report import PICTURE_SUFFIXES
    from steplab.report.charts.plot import check_plot

    if args.picture:
        check_plot(args.picture, PICTURE_SUFFIXES)


def _predict(forecaster: Forecaster, histories: Histories, args: argparse.Namespace) -> Prediction:
    from steplab.cli.progress import ItemProgress

    with ItemProgress("series", len(histories)) as progress:
        return forecaster.predict(
            list(histories.values),
            args.horizon,
            quantiles=args.quantiles,
            batch=args.batch,
            head=args.head,
            names=histories.ids,
            progress=progress.advance,
        )


def _print_results(
    args: argparse.Namespace, forecaster: Forecaster, histories: Histories, prediction: Prediction
) -> None:
    from steplab.forecasting.forecast_report import forecast_table
    from steplab.report.terminal import print_table

    print_table(forecast_table(forecaster, histories, prediction))
    for what, path in (("forecasts", args.out), ("picture", args.picture)):
        if path:
            print(f"{what} in {path}")


def _levels(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 0.1,0.5,0.9") from None


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


COMMAND = Command(_flags, _run)
