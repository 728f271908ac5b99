"""Trials whose steps are shared by ranks pass the gate first. No torch in this process."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Self

from steplab.core import Environment, Run, RunSpec, fingerprint
from steplab.core.errors import MeasurementError
from steplab.core.ladder import UNVERIFIED
from steplab.verify.choice import choose_shapes
from steplab.verify.remote import ReferenceWorker
from steplab.verify.shapes import GateShape, one_process
from steplab.workers.client import Progress
from steplab.workers.trials import TrialRunner

VERIFIED_TRIAL = "steplab.verify.candidate:verified_trial"


class GatedTrials:
    """Measures specs; a step that several ranks share is first compared with one process.

    What one process computes is computed once for all recipes of a step.
    """

    def __init__(self, trials: TrialRunner) -> None:
        self.trials = trials
        self.stack = ExitStack()
        self.references: ReferenceWorker | None = None
        self.folder = Path()
        self.shapes: dict[str, tuple[GateShape, ...]] = {}  # by the fingerprint of the truth

    def trial(self, spec: RunSpec, environment: Environment, key: str, progress: Progress) -> Run:
        """Return the Run of one spec, with the gate's verdict where ranks share the step."""
        if spec.ranks == 1:
            return self.trials.trial(spec, environment, key, progress)
        try:
            shapes = self._prepare(spec, progress)
        except MeasurementError as error:
            run = self.trials.trial(spec, environment, key, progress)
            notes = (*run.notes, f"gate: {error}")
            return replace(run, verdict=UNVERIFIED, notes=notes)
        gate = {"shapes": shapes, "references": self.references_folder(spec)}
        return self.trials.trial(spec, environment, key, progress, VERIFIED_TRIAL, **gate)

    def references_folder(self, spec: RunSpec) -> Path:
        """Return where the references of a step are, whatever its recipe and its ranks."""
        return self.folder / fingerprint(one_process(spec))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stack.close()

    def _prepare(self, spec: RunSpec, progress: Progress) -> tuple[GateShape, ...]:
        """Have the references that a recipe is judged by, or say why they cannot be had."""
        if self.references is None:
            folder = tempfile.TemporaryDirectory(prefix="steplab-gate-")
            self.folder = Path(self.stack.enter_context(folder))
            self.references = self.stack.enter_context(ReferenceWorker())
        references, timeout = self.references, self.trials.timeout
        references.folder = self.references_folder(spec)
        references.folder.mkdir(exist_ok=True)
        truth = references.folder.name
        if truth not in self.shapes:
            found = choose_shapes(references, spec, None, timeout, progress, progress)
            self.shapes[truth] = tuple(found)
        shapes, problem = references.prepare(spec, self.shapes[truth], timeout, progress)
        if problem:
            raise MeasurementError(problem.message, problem.suggestion)
        return shapes
