"""One recipe before the gate, check by check, on the device that is here.

    PYTHONPATH=src python benchmarks/gate.py WORKLOAD --recipe RECIPE [--size S] [--batch N]

`steplab tune` sends every candidate through the same gate and tells the verdict; here every check
is a row with what it saw, green or red. Exit code 1 where one is red.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from time import perf_counter

import torch

from steplab.cli.command import Parser
from steplab.core import Column, RunSpec, Table
from steplab.core.errors import MeasurementError, SteplabError
from steplab.probes.environment import capture_environment
from steplab.report.export import check_suffixes, write_table
from steplab.report.terminal import print_table
from steplab.step.assemble import find_device
from steplab.techniques.recipes import parse_recipe
from steplab.verify.candidate import Candidate
from steplab.verify.choice import choose_shapes
from steplab.verify.remote import CandidateResult, ReferenceWorker
from steplab.workloads.workload import find_workload

RED = 1


def main() -> int:
    """Judge, print, write; return the exit code."""
    parser = Parser("gate.py", "One recipe before the gate, check by check.")
    add = parser.add_argument
    add("workload", help="a built-in workload")
    add("--recipe", required=True, help="the recipe to judge")
    add("--size", default="tiny", help="preset of the workload")
    add("--batch", type=int, default=4, help="sequences per step")
    add("--steps", type=int, default=10, help="timed steps, where it is green")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    add("--timeout", type=float, default=300.0, help="seconds that a reference may take")
    add("--out", type=Path, nargs="*", default=[], help="write the table")
    try:
        args = parser.parse(sys.argv[1:])
        check_suffixes(args.out)
        started = perf_counter()
        spec = RunSpec(
            args.workload, find_workload(args.workload).resolve(args.size, {}), args.size,
            batch=args.batch, recipe=parse_recipe(args.recipe), steps=args.steps, mode="full",
            device=find_device(args.device).type,
        )  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="steplab-gate-") as folder:
            result = judged(spec, Path(folder), args.timeout)
        table = tabulated(spec, result, perf_counter() - started)
        print_table(table)
        for path in args.out:
            write_table(table, path)
    except SteplabError as error:
        print(f"gate.py: {error}", file=sys.stderr)
        return error.exit_code
    green = result.run.status == "ok" and all(check.passed for check in result.checks)
    return 0 if green else RED


def judged(spec: RunSpec, folder: Path, timeout: float) -> CandidateResult:
    """Return what the gate and, behind it, the clock say."""

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    # The worker ends before the step is measured: its references take memory.
    with ReferenceWorker() as references:
        references.folder = folder
        shapes = tuple(choose_shapes(references, spec, None, timeout, say, say))
        shapes, problem = references.prepare(spec, shapes, timeout, say)
    if problem:
        raise MeasurementError(f"{spec.recipe} cannot be judged: {problem}")
    return Candidate(spec, shapes, folder).open(say)


def tabulated(spec: RunSpec, result: CandidateResult, seconds: float) -> Table:
    """Return one row per check."""
    rows = tuple((c.name, "green" if c.passed else "red", c.detail) for c in result.checks)
    clock = result.run.clock
    measured = f"{clock.step.median:.2f} ms a step" if clock else f"{result.run.reason or 'red'}"
    note = f"{spec.workload} {spec.size}, batch {spec.batch}: {measured}; {seconds:.0f} s in all.\n"
    note += capture_environment().conditions_on(spec.device)
    columns = (Column("check"), Column("verdict"), Column("what was seen"))
    return Table(f"The gate on {spec.recipe}", columns, rows, note)


if __name__ == "__main__":
    sys.exit(main())
