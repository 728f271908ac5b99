"""What the Meter itself costs the host: empty steps with four phases, with and without it.

    PYTHONPATH=src python benchmarks/meter_overhead.py [--steps N] [--repeats N] [--out FILE]

Steps on the GPU are empty too, so that nothing but the Meter's events is in its queue. Repeats are
short (some milliseconds) and alternate with the bare loop, so that a busy machine spoils few.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter

import torch

from steplab import Meter, Samples
from steplab.cli.command import Parser
from steplab.core import Cell, Column, Table
from steplab.core.errors import SteplabError, UserError
from steplab.probes.environment import capture_environment
from steplab.report.export import write_table
from steplab.report.terminal import print_table

PHASES = ("forward", "backward", "clip", "optimizer")
TEN_MS_IN_US = 10_000.0
LINE_EVERY = 10


def main() -> int:
    """Measure, print the table and write it where asked; return the exit code."""
    parser = Parser("meter_overhead.py", "What the Meter costs the host per step.")
    parser.add_argument("--steps", type=int, default=200, help="steps per repeat")
    parser.add_argument("--repeats", type=int, default=200, help="repeats of every case")
    parser.add_argument("--out", type=Path, help="also write the table here (.md, .json or .csv)")
    try:
        args = parser.parse(sys.argv[1:])
        if args.steps < 1 or args.repeats < 1:
            raise UserError("--steps and --repeats must be at least 1.")
        table = measure_all(args)
        print_table(table)
        if args.out:
            write_table(table, args.out)
    except SteplabError as error:
        print(f"meter_overhead.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def measure_all(args: argparse.Namespace) -> Table:
    """Return one row per device and way of use; microseconds of host time per step."""
    rows: list[tuple[Cell, ...]] = []
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for device in devices:
        for use, line_every in (("steps", None), (f"+ line every {LINE_EVERY}", LINE_EVERY)):
            own = own_time(device, line_every, args.steps, args.repeats)
            views = (own.median, own.percentile(10), own.percentile(90))
            rows.append((device, use, len(PHASES), *views, own.median / TEN_MS_IN_US * 100))
    environment = capture_environment()
    conditions = "\n".join(f"{device}: {environment.conditions_on(device)}" for device in devices)
    units = [("device", ""), ("use", ""), ("phases", ""), ("median", "us")]
    units += [("10th percentile", "us"), ("90th", "us"), ("share of a 10 ms step", "%")]
    return Table(
        title="Host time that the Meter adds to a step",
        columns=tuple(Column(name, unit) for name, unit in units),
        rows=tuple(rows),
        note=f"{args.repeats} repeats of {args.steps} empty steps, the same loop without the "
        f"Meter taken off.\n{conditions}",
    )


def own_time(device: str, line_every: int | None, steps: int, repeats: int) -> Samples:
    """Return the Meter's microseconds per step, one value per repeat; the first is warm-up."""
    meter = Meter(torch.nn.Linear(8, 8, device=device), dtype="fp32", inspect_step=None)
    metered_loop(meter, steps, line_every)
    values = [metered_loop(meter, steps, line_every) - bare_loop(steps) for _ in range(repeats)]
    return Samples(tuple(values), "us")


def bare_loop(steps: int) -> float:
    """Microseconds per step of the same loop with scopes that do nothing."""
    nothing = nullcontext()
    start = perf_counter()
    for _ in range(steps):
        with nothing:
            for _name in PHASES:
                with nothing:
                    pass
    return (perf_counter() - start) / steps * 1e6


def metered_loop(meter: Meter, steps: int, line_every: int | None) -> float:
    """Microseconds per step of the loop under `meter`."""
    start = perf_counter()
    for _ in range(steps):
        with meter.step(tokens=1024):
            for name in PHASES:
                with meter.phase(name):
                    pass
        if line_every and meter.due(line_every):
            meter.line()
    return (perf_counter() - start) / steps * 1e6


if __name__ == "__main__":
    sys.exit(main())
