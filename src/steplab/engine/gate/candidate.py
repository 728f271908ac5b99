"""A candidate: assembled, held against the references, measured, and kept alive for turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from steplab.engine.gate.evidence import Evidence, gather
from steplab.engine.gate.files import load_references
from steplab.engine.gate.judge import judge
from steplab.engine.gate.opened import Opened
from steplab.engine.gate.shapes import GateShape
from steplab.engine.gate.syncs import waiting_lines
from steplab.engine.gate.truth import fresh
from steplab.engine.loop import Progress, measure, settle, warm_up
from steplab.engine.profiling.plan import Plan
from steplab.engine.profiling.session import STEADY_STEPS, record
from steplab.engine.step import Step
from steplab.engine.trial import clean_up, failed, watched
from steplab.probes.clock import ClockProbe
from steplab.probes.environment import capture
from steplab.probes.probe import Subject
from steplab.record import Run, Samples, new_run_id
from steplab.record.ladder import Check
from steplab.record.run import now
from steplab.spec import PLAIN, RunSpec


class RedGate(Exception):
    """The numerics are wrong: there is nothing to measure."""


class Candidate:
    """One recipe in a process of its own."""

    def __init__(self, spec: RunSpec, shapes: Sequence[GateShape], references: Path) -> None:
        self.spec = spec
        self.shapes = shapes
        self.references = references
        self.checks: list[Check] = []
        self.waits: tuple[str, ...] = ()
        self.subject: Subject | None = None

    def open(self, progress: Progress) -> Opened:
        """Pass the gate's numerics, then measure; every failure is the Run's status."""
        blank = Run(new_run_id(self.spec), self.spec, capture(), created=now())
        try:
            self._compare_apart(progress)
            run = watched(blank, progress, self._afterwards, lambda s: self._compare(s, progress))
        except RedGate:
            run = blank
        except Exception as error:
            run = failed(blank, error)
        ops = _ops(self.subject) if self.subject else {}
        return Opened(run, tuple(self.checks), self.waits, ops)

    def measure(self, steps: int) -> Samples:
        """Time so many further steps, milliseconds each, after one that is not counted.

        Memory that only the steps need is given back: the other worker may need it.
        """
        assert self.subject is not None
        warm_up(self.subject, 1, lambda text: None)
        clock = ClockProbe()
        measure(self.subject, steps, clock, [], lambda text: None)
        park()
        return clock.result().step

    def record(self, run: Run, plan: Plan, folder: Path, progress: Progress) -> Run:
        """Add a profile to this candidate's Run, with traces in `folder`."""
        assert self.subject is not None
        recorded = record(self.subject, run, plan, folder, progress)
        self._settle(progress)
        park()
        return recorded

    def _compare_apart(self, progress: Progress) -> None:
        """Compare numerics at shapes, or without dropout, that the measured step has not."""
        for shape in self.shapes:
            if self._is_own(shape):
                continue
            spec = replace(shape.spec, recipe=self.spec.recipe)
            progress(f"comparing with fp64 {shape.words}")
            try:
                self._judge(gather(fresh(spec), spec, shape.rate), shape)
            finally:
                clean_up()

    def _compare(self, subject: Subject, progress: Progress) -> float | None:
        """Compare the numerics of the very step that is measured; seconds of its first step."""
        own = next((shape for shape in self.shapes if self._is_own(shape)), None)
        if own is None:
            return None
        assert isinstance(subject.step, Step)
        progress("comparing with fp64")
        evidence = gather(subject.step, self.spec, own.rate)
        self._judge(evidence, own)
        return evidence.first_seconds

    def _is_own(self, shape: GateShape) -> bool:
        return not shape.apart and shape.spec == replace(self.spec, recipe=PLAIN)

    def _judge(self, evidence: Evidence, shape: GateShape) -> None:
        """Add checks; stop at wrong numerics."""
        truth, *peers = load_references(self.references, shape.name, evidence.matmul_dtype)
        self.checks += judge(evidence, peers, truth, shape.words)
        if not all(check.passed for check in self.checks):
            raise RedGate

    def _afterwards(self, subject: Subject, run: Run) -> Run:
        """Bring the step back to its steady state and keep it."""
        self.subject = subject
        self._settle(lambda text: None)
        self.waits = tuple(waiting_lines(subject))
        park()
        return run

    def _settle(self, progress: Progress) -> None:
        assert self.subject is not None
        compiles = self.subject.step.parts.settle_steps
        settle(self.subject, compiles, progress)
        warm_up(self.subject, STEADY_STEPS if compiles else 1, progress)


def park() -> None:
    """Give cached device memory back; weights and optimizer state stay."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _ops(subject: Subject) -> dict[str, tuple[str, ...]]:
    """Return the paths of the modules that declare an op, by op."""
    found: dict[str, tuple[str, ...]] = {}
    for path, module in subject.step.model.named_modules():
        if hasattr(module, "op") and hasattr(module, "ran"):
            op = str(module.op)
            found[op] = (*found.get(op, ()), path)
    return found
