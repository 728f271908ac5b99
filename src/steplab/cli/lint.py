"""Find lines that wait for the device, branch, vary in size or break graphs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from steplab.cli.command import Command
from steplab.cli.flags import (
    add_config_flags,
    add_workload_argument,
    check_device,
    given_fields,
    workload_name,
)
from steplab.core import RunSpec, units
from steplab.core.errors import UserError
from steplab.report.export import WRITERS, check_suffixes, write_table
from steplab.report.terminal import print_table
from steplab.techniques.recipes import parse_recipe
from steplab.workloads.workload import find_workload

DEFAULT_WORKLOAD = "tsmoe"
ON_CPU = (
    "seen on a CPU: what Python calls and what torch dispatches. Waits inside of CUDA's own "
    "operators show on a GPU only."
)


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    entry = add_workload_argument(parser, words, DEFAULT_WORKLOAD)
    add = parser.add_argument
    sizes = ", ".join(entry.presets) or "this workload has none"
    add("--size", default="", help=f"preset size ({sizes}); empty: by the device")
    add("--batch", type=int, default=2, help="sequences per micro-batch")
    add("--mode", default="full", help="how far the step goes")
    add("--recipe", default="plain", help="plain, technique=value,..., a preset or a file")
    add("--steps", type=int, default=3, help="watched steps, each on another batch")
    add("--device", default="auto", help="cpu, cuda, or auto")
    add("--fail", action="store_true", help="end with code 1 when anything is found")
    add("--out", nargs="+", type=Path, default=[], metavar="FILE",
        help=f"also write the table ({' '.join(WRITERS)})")  # fmt: skip
    add_config_flags(parser, entry.config, many=False)


def _run(args: argparse.Namespace) -> int:
    check_suffixes(args.out)
    check_device(args.device)
    if args.steps < 2:
        raise UserError(f"--steps must be at least 2, not {args.steps}: sizes are compared.")
    spec = _spec(args)

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


def _spec(args: argparse.Namespace) -> RunSpec:
    name = workload_name(args)
    entry = find_workload(name)
    recipe = parse_recipe(args.recipe)

    import torch

    auto = "cuda" if torch.cuda.is_available() else "cpu"
    device = auto if args.device == "auto" else args.device
    size = args.size or (entry.gpu_preset if device == "cuda" else entry.cpu_preset)
    return RunSpec(
        workload=name,
        config=entry.resolve(size, given_fields(args)),
        size=size,
        batch=args.batch,
        mode=args.mode,
        recipe=recipe,
        device=device,
        source=entry.source,
    )


COMMAND = Command(_flags, _run)
