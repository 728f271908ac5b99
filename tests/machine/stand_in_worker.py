"""A worker that computes nothing: a real process with real calls, and answers without torch.

    python -m tests.machine.stand_in_worker

It kills itself once where a file in the folder $DEATHS says so, for example "measuring plain".
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from steplab.core import Run, RunSpec, Samples, new_run_id
from steplab.core.errors import MeasurementError
from steplab.core.ladder import Check
from steplab.profiling.plan import ProfilePlan
from steplab.verify.remote import (
    CANDIDATE,
    CHECK_CURVES,
    DRY_RUN,
    HAS_DROPOUT,
    MAKE_REFERENCES,
    WHY_UNDECIDED,
    CandidateResult,
)
from steplab.verify.shapes import GateShape
from steplab.workers import program
from steplab.workers.client import Progress
from steplab.workers.pool import PRELOAD
from tests.tune.ladders import simulated_run

MS = 100.0


def reach(stage: str, spec: RunSpec) -> None:
    """Die here if this stage of this recipe is one to die in."""
    for name in spec.recipe.techniques or ("plain",):
        with contextlib.suppress(FileNotFoundError):
            (Path(os.environ["DEATHS"]) / f"{stage} {name}").unlink()
            os.kill(os.getpid(), signal.SIGKILL)


def preload() -> None:
    """There is nothing to import."""


def has_dropout(spec: RunSpec) -> bool:
    """No."""
    return False


def why_undecided(shape: GateShape, dtype: str, folder: Path) -> str:
    """Everything is decided."""
    return ""


def make_references(shape: GateShape, dtype: str, folder: Path) -> str:
    """Every reference can be had."""
    reach(dtype, shape.spec)
    return ""


def dry_run(spec: RunSpec, shape: GateShape) -> str:
    """Everything runs, in fp32."""
    reach("dry-running", spec)
    return "fp32"


def check_curves(spec: RunSpec, folder: Path) -> tuple[Check, ...]:
    """Many steps are right, too."""
    reach("curves", spec)
    return (Check("curves", True, "right"),)


class Candidate:
    """Passes the gate; the technique "quick" makes it twice as fast."""

    def __init__(self, spec: RunSpec, shapes: tuple[GateShape, ...], references: Path) -> None:
        reach("building", spec)
        self.spec = spec
        self.ms = MS / 2 if "quick" in spec.recipe.techniques else MS
        self.turns = 0

    def open(self, progress: Progress) -> CandidateResult:
        """Compare, then measure."""
        for stage in ("comparing", "measuring"):
            progress(stage)
            reach(stage, self.spec)
        run = simulated_run(self.spec, self.ms)
        run = replace(run, id=new_run_id(self.spec), profile=None)
        return CandidateResult(run, (Check("gradients", True, "right"),))

    def measure(self, steps: int) -> Samples:
        """Take a turn."""
        reach("turns", self.spec)
        self.turns += 1
        return Samples(tuple(self.ms * (1 + 0.001 * (i + self.turns % 2)) for i in range(3)), "ms")

    def record(self, run: Run, plan: ProfilePlan, folder: Path, progress: Progress) -> Run:
        """There is no profiler here, which costs the ceilings."""
        reach("tracing", self.spec)
        raise MeasurementError("there is nothing to trace.")


STAND_INS: dict[str, Callable[..., Any]] = {
    CANDIDATE: Candidate,
    CHECK_CURVES: check_curves,
    DRY_RUN: dry_run,
    HAS_DROPOUT: has_dropout,
    MAKE_REFERENCES: make_references,
    PRELOAD: preload,
    WHY_UNDECIDED: why_undecided,
}


class StandIns(program.Program):
    """Finds the functions of this file in place of those that need torch."""

    def _find(self, name: str) -> Callable[..., Any]:
        return STAND_INS.get(name) or super()._find(name)


if __name__ == "__main__":
    program.Program = StandIns  # type: ignore[misc]
    program.serve()
