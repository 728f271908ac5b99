"""Series per second of batched forecasts, against a plain loop over the series.

    PYTHONPATH=src python benchmarks/forecast_throughput.py [--series N] [--size S] [--out FILE]

The same model (random weights) forecasts the same random walks three ways: a loop that computes
the whole context anew for every head, a loop with a cache, and the Forecaster. The loops run over
a sample of the series. No number is printed unless all three give the same forecasts.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from steplab.cli.command import Parser
from steplab.core import Cell, Column, Samples, Table
from steplab.core.errors import MeasurementError, SteplabError, UserError
from steplab.forecasting.decode import Cached, Uncached, decode
from steplab.forecasting.forecaster import Forecaster
from steplab.probes.environment import capture_environment
from steplab.report.export import write_table
from steplab.report.terminal import print_table
from steplab.step.assemble import find_device
from steplab.techniques.recipes import parse_recipe
from steplab.train.pretrained import apply_inference_recipe
from steplab.workloads.tsmoe.config import PRESETS
from steplab.workloads.tsmoe.model import Tsmoe

SIZE = "starter"  # what `steplab train` trains
ALLOWED = {"fp32": 1e-3, "other": 0.1}  # difference of the ways, in deviations of the context
Walks = NDArray[np.float64]


def main() -> int:
    """Measure, print the table and write it where asked; return the exit code."""
    parser = Parser("forecast_throughput.py", "Series per second of batched forecasts.")
    parser.add_argument("--series", type=int, default=10_000, help="series of the batched rows")
    parser.add_argument("--points", type=int, default=512, help="points of every context")
    parser.add_argument("--horizon", type=int, default=96, help="points to forecast")
    parser.add_argument("--sample", type=int, default=32, help="series of the rows with a loop")
    parser.add_argument("--batch", type=int, default=256, help="series at a time")
    parser.add_argument(
        "--size", default="", help=f"preset: {', '.join(PRESETS)}; default depends on the device"
    )
    parser.add_argument("--device", nargs="+", default=devices(), help="cpu, cuda")
    parser.add_argument("--recipe", nargs="+", default=["plain"], help="plain, precision=bf16 ...")
    parser.add_argument("--out", type=Path, help="also write the table here (.md, .json or .csv)")
    try:
        args = parser.parse(sys.argv[1:])
        for name in ("series", "points", "horizon", "sample", "batch"):
            if getattr(args, name) < 1:
                raise UserError(f"--{name} must be at least 1.")
        table = measure_all(args)
        print_table(table)
        if args.out:
            write_table(table, args.out)
    except SteplabError as error:
        print(f"forecast_throughput.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def devices() -> list[str]:
    """Return what there is to measure on."""
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def measure_all(args: argparse.Namespace) -> Table:
    """Return three rows per device and recipe."""
    generator = np.random.default_rng(0)
    walks_BT = np.cumsum(generator.normal(size=(args.series, args.points)), 1)
    rows: list[tuple[Cell, ...]] = []
    for device in args.device:
        for recipe in args.recipe:
            forecaster = build(args, device, recipe)
            rows += measure(forecaster, walks_BT, args, device, recipe)
    columns = [("device", ""), ("size", ""), ("recipe", ""), ("way", ""), ("series", "")]
    columns += [("throughput", "series/s"), ("one series", "ms"), ("ratio", "x")]
    columns += [("largest difference", "std")]
    environment = capture_environment()
    conditions = "\n".join(f"{one}: {environment.conditions_on(one)}" for one in args.device)
    return Table(
        title=f"Forecasts of {args.horizon} points after contexts of {args.points}",
        columns=tuple(Column(name, unit) for name, unit in columns),
        rows=tuple(rows),
        note=f"Random weights; loops over {args.sample} series (median time of one), batches of "
        f"up to {args.batch} (all series, once). Ratio: to the loop without a cache. Difference: "
        f"to that loop, over the sample.\n{conditions}",
    )


def build(args: argparse.Namespace, device: str, recipe: str) -> Forecaster:
    """Return a Forecaster with random weights whose window takes the context and the horizon."""
    find_device(device)
    size = args.size or SIZE
    if size not in PRESETS:
        raise UserError(f"There is no size {size!r}.", f"Known: {', '.join(PRESETS)}.")
    window = max(PRESETS[size].seq_max_len, 2 * (args.points + args.horizon))
    torch.manual_seed(0)
    model = Tsmoe(dataclasses.replace(PRESETS[size], seq_max_len=window)).to(device).eval()
    return Forecaster(model, size, apply_inference_recipe(parse_recipe(recipe), model, "forecasts"))


def measure(
    forecaster: Forecaster, walks_BT: Walks, args: argparse.Namespace, device: str, recipe: str
) -> list[tuple[Cell, ...]]:
    """Return the rows of one device and recipe."""
    sample_BT = walks_BT[: args.sample]
    plain, plain_ms = loop(forecaster, sample_BT, args.horizon, cached=False)
    cached, cached_ms = loop(forecaster, sample_BT, args.horizon, cached=True)
    forecaster.predict(walks_BT[: args.batch], args.horizon, batch=args.batch)  # warm-up
    start = perf_counter()
    found = forecaster.predict(walks_BT, args.horizon, batch=args.batch).mean_BH
    batched_ms = (perf_counter() - start) / len(walks_BT) * 1e3
    rows: list[tuple[Cell, ...]] = []
    for way, count, ms, means in (
        ("loop, no cache", len(sample_BT), plain_ms.median, plain),
        ("loop, cache", len(sample_BT), cached_ms.median, cached),
        ("Forecaster", len(walks_BT), batched_ms, found[: args.sample]),
    ):
        apart = difference(means, plain, sample_BT, recipe)
        speed = (1e3 / ms, ms, plain_ms.median / ms)
        rows.append((device, forecaster.name, recipe, way, count, *speed, apart))
    return rows


def loop(
    forecaster: Forecaster, walks_BT: Walks, horizon: int, cached: bool
) -> tuple[Walks, Samples]:
    """Forecast series after series; return the forecasts and the milliseconds of each."""
    model, passes = forecaster.model, forecaster.passes(horizon)
    device = next(model.parameters()).device
    means, times = [], []
    for series in [walks_BT[0], *walks_BT]:  # the first one twice: warm-up
        start = perf_counter()
        mean, std = series.mean(), series.std()
        values_1T = torch.tensor((series - mean) / std, dtype=torch.float32, device=device)[None]
        with forecaster.forward_context():
            feed = Cached(model, None) if cached else Uncached(model)
            points_1H = decode(feed, values_1T, None, passes).points_BH
        means.append(points_1H[0].double().cpu().numpy() * std + mean)
        times.append((perf_counter() - start) * 1e3)
    return np.stack(means[1:]), Samples(tuple(times[1:]), "ms")


def difference(found: Walks, expected: Walks, walks_BT: Walks, recipe: str) -> float:
    """Return the largest difference; refuse a way that gives other forecasts.

    Judged by the median series: where two experts are nearly as likely, rounding decides.
    """
    apart_B = abs(found - expected).max(1) / walks_BT.std(1)
    allowed = ALLOWED["fp32" if recipe == "plain" else "other"]
    if not np.median(apart_B) <= allowed:
        raise MeasurementError(
            f"The ways differ by {np.median(apart_B):.2g} deviations, more than {allowed:g}."
        )
    return float(apart_B.max())


if __name__ == "__main__":
    sys.exit(main())
