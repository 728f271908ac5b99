"""Find lines that wait for the device, branch, vary in size or break graphs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from steplab.cli.command import Command
from steplab.cli.flags import add_out_flag, local_device
from steplab.cli.step_flags import (
    add_step_flags,
    add_workload_flags,
    assumed_device,
    step_spec,
)
from steplab.core import units
from steplab.core.errors import UserError
from steplab.report.export import write_table
from steplab.report.terminal import print_table

DEFAULT_WORKLOAD = "tsmoe"
ON_CPU = (
    "seen on a CPU: what Python calls and what torch dispatches. Waits inside CUDA's own "
    "operators show up on a GPU only."
)


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    add_workload_flags(parser, words, DEFAULT_WORKLOAD)
    add_step_flags(parser, (), batch=2)
    add = parser.add_argument
    add("--steps", type=int, default=3, metavar="N", help="steps to watch, each on another batch")
    add("--fail", action="store_true", help="exit with code 1 when anything is found")
    add_out_flag(parser)


def _run(args: argparse.Namespace) -> int:
    if args.steps < 2:
        raise UserError(f"--steps must be at least 2, not {args.steps}: sizes are compared.")
    step_spec(args, assumed_device(args.device))  # reports typos before torch is imported
    spec = step_spec(args, local_device(args.device))

    from steplab.lint.hazards import hazard_table
    from steplab.lint.lint import lint

    hazards = lint(spec, args.steps)
    note = ON_CPU if spec.device == "cpu" else ""
    title = f"{units.counted(len(hazards), 'hazard')} in a step of {spec.workload}"
    table = hazard_table(hazards, title, note)
    for path in args.out:
        write_table(table, path)
    if hazards:
        print_table(table)
    else:
        print(f"no hazard in a step of {spec.workload}\n{note}".rstrip())
    return 1 if args.fail and hazards else 0


COMMAND = Command(_flags, _run)
