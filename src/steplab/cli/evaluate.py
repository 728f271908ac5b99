"""Score a model's forecasts against seasonal naive."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from steplab.cli.command import Command
from steplab.cli.flags import add_device_flag, file_to_write
from steplab.cli.step_flags import add_model_flag, add_recipe_flag
from steplab.core.codec import encode
from steplab.core.errors import UserError
from steplab.core.output_file import keep_inputs, write_output

if TYPE_CHECKING:
    from steplab.forecasting.evaluation.data import EvaluationData
    from steplab.forecasting.evaluation.evaluate import Evaluation, EvaluationResult
    from steplab.forecasting.forecaster import Forecaster

OUT_SUFFIXES = (".json", ".md", ".csv")


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    add = parser.add_argument
    add("--checkpoint", type=Path, metavar="PATH",
        help="checkpoint, folder of checkpoints, or Time-MoE folder; default: the newest that "
        "`steplab train` wrote")  # fmt: skip
    add_model_flag(parser)
    add("--data", type=Path, metavar="PATH",
        help="file or folder of series; default: generated, never trained on")  # fmt: skip
    add("--horizon", type=int, default=64, metavar="N", help="points to forecast")
    add("--windows", type=int, default=2, metavar="K", help="windows at the end of each series")
    add("--context", type=int, metavar="N",
        help="points of the past that the model sees; default: as many as it can use")  # fmt: skip
    add("--period", type=int, metavar="P",
        help="period for seasonal naive and MASE; default: the true one for generated series, the "
        "usual one for the time step of a frame, otherwise 1")  # fmt: skip
    add("--out", nargs="+", type=file_to_write("--out"), default=[], metavar="FILE",
        help="also write .json (everything), .md or .csv (the tables)")  # fmt: skip
    add("--picture", type=file_to_write("--picture"), metavar="FILE",
        help="draw ratios and windows: .html or .png")  # fmt: skip
    add("--batch", type=int, default=256, metavar="N", help="series at a time")
    add_recipe_flag(parser)
    add_device_flag(parser)


def _run(args: argparse.Namespace) -> int:
    from steplab.forecasting.evaluation.picture import write_picture
    from steplab.forecasting.evaluation.tables import metrics_table, ratios_table, verdict
    from steplab.report.terminal import print_table

    _check(args)
    data = _data(args)
    from steplab.forecasting.forecaster import Forecaster  # imports torch

    forecaster = Forecaster.load(args.checkpoint, args.device, args.recipe, args.model, warn=_note)
    result = _evaluate(args, forecaster, data)
    found = result.evaluation
    for path in args.out:
        _write(found, path)
    if args.picture:
        write_picture(result, args.picture)
    for table in (metrics_table(found), ratios_table(found)):
        print_table(table)
    print(f"{verdict(found)}\n{found.conditions}")
    for path in [*args.out, *filter(None, [args.picture])]:
        print(f"written {path}")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse bad arguments before torch is imported and a model is loaded."""
    from steplab.forecasting.evaluation.data import check_period
    from steplab.forecasting.evaluation.picture import PICTURE_SUFFIXES
    from steplab.forecasting.evaluation.windows import EvaluationPlan
    from steplab.report.charts.plot import check_plot

    EvaluationPlan(args.horizon, args.windows, 1 if args.context is None else args.context)
    check_period(args.period)
    if args.batch < 1:
        raise UserError(f"--batch must be at least 1, not {args.batch}.")
    for path in args.out:
        if path.suffix not in OUT_SUFFIXES:
            raise UserError(f"Cannot write {path}.", f"Use a suffix of {', '.join(OUT_SUFFIXES)}.")
    keep_inputs(filter(None, [args.data]), args.out)
    if args.picture:
        check_plot(args.picture, PICTURE_SUFFIXES)


def _data(args: argparse.Namespace) -> EvaluationData:
    from steplab.forecasting.evaluation.data import generated_data, open_data

    data = open_data(args.data, args.period) if args.data else generated_data(args.period)
    for note in data.notes:
        _note(note)
    return data


def _evaluate(
    args: argparse.Namespace, forecaster: Forecaster, data: EvaluationData
) -> EvaluationResult:
    from steplab.cli.progress import ItemProgress
    from steplab.forecasting.evaluation.evaluate import check_held_out, evaluate
    from steplab.forecasting.evaluation.windows import EvaluationPlan
    from steplab.probes.environment import capture_environment

    if not args.data:
        check_held_out(Path(forecaster.name))
    usable = forecaster.passes(args.horizon)[0].context
    plan = EvaluationPlan(args.horizon, args.windows, min(args.context or usable, usable))
    if args.context and args.context > usable:
        _note(f"the model uses {usable:,} points of the past, not {args.context:,}")
    with ItemProgress("windows", len(data.series) * args.windows) as progress:
        result = evaluate(
            lambda contexts, horizon: forecaster.predict(
                contexts, horizon, batch=args.batch, progress=progress.advance
            ),
            forecaster.name,
            data,
            plan,
        )
    device = next(forecaster.model.parameters()).device.type
    conditions = capture_environment().conditions_on(device)
    return replace(result, evaluation=replace(result.evaluation, conditions=conditions))


def _write(found: Evaluation, path: Path) -> None:
    from steplab.forecasting.evaluation.tables import metrics_table, ratios_table
    from steplab.report.export import write_table

    if path.suffix == ".json":
        text = json.dumps({"steplab_evaluation": 1, **encode(found)}, indent=1, allow_nan=False)
        write_output(path, f"{text}\n".encode())
        return
    write_table(metrics_table(found), path)
    write_table(ratios_table(found), path.with_suffix(f".ratios{path.suffix}"))


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


COMMAND = Command(_flags, _run)
