"""A candidate: assembled, compared with the references, measured, and kept alive."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from steplab.core import PLAIN, Run, RunSpec, Samples, new_run_id
from steplab.core.ladder import Check
from steplab.core.run import now
from steplab.probes.clock import ClockProbe
from steplab.probes.environment import capture_environment
from steplab.probes.probe import Subject
from steplab.profiling.plan import ProfilePlan
from steplab.profiling.recorder import STEADY_STEPS, record_profile
from steplab.step.loop import Progress, measure, settle, warm_up
from steplab.step.step import Step
from steplab.step.trial import clean_up, failed_run, run_probes
from steplab.verify.judge import judge
from steplab.verify.numerics import NumericsSnapshot, load_references, take_snapshot
from steplab.verify.references import step_without_dropout
from steplab.verify.remote import CandidateResult
from steplab.verify.shapes import GateShape

SYNC_WARNING = "called a synchronizing CUDA operation"  # torch's, in sync debug mode


def sync_lines(subject: Subject) -> list[str]:
    """Run one step and return `folder/file.py:12` for every wait; nothing without a GPU."""
    if not subject.on_cuda:
        return []
    batch = next(subject.feed)  # what fetching it waits for is no matter of the step
    with _sync_warnings() as seen:
        subject.step(batch)
    told = [w for w in seen if SYNC_WARNING in str(w.message)]
    return [f"{'/'.join(Path(w.filename).parts[-2:])}:{w.lineno}" for w in told]


@contextlib.contextmanager
def _sync_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Let torch warn of every wait that it knows of."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield seen
        finally:
            torch.cuda.set_sync_debug_mode(before)


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

    def open(self, progress: Progress) -> CandidateResult:
        """Pass the gate's numerics, then measure; every failure is the Run's status."""
        blank = Run(new_run_id(self.spec), self.spec, capture_environment(), created=now())
        try:
            self._compare_apart(progress)
            run = run_probes(
                blank, progress, self._afterwards, lambda s: self._compare(s, progress)
            )
        except RedGate:
            run = blank
        except Exception as error:
            run = failed_run(blank, error)
        ops = _modules_by_op(self.subject) if self.subject else {}
        return CandidateResult(run, tuple(self.checks), self.waits, ops)

    def measure(self, steps: int) -> Samples:
        """Time so many further steps, milliseconds each, after one that is not counted.

        Memory that only the steps need is given back: the other worker may need it.
        """
        assert self.subject is not None
        warm_up(self.subject, 1, lambda text: None)
        clock = ClockProbe()
        measure(self.subject, steps, clock, [], lambda text: None)
        release_cache()
        return clock.result().step

    def record(self, run: Run, plan: ProfilePlan, folder: Path, progress: Progress) -> Run:
        """Add a profile to this candidate's Run, with traces in `folder`."""
        assert self.subject is not None
        recorded = record_profile(self.subject, run, plan, folder, progress)
        self._settle(progress)
        release_cache()
        return recorded

    def _compare_apart(self, progress: Progress) -> None:
        """Compare numerics at shapes, or without dropout, that the measured step has not."""
        for shape in self.shapes:
            if self._is_own(shape):
                continue
            spec = replace(shape.spec, recipe=self.spec.recipe)
            progress(f"comparing with fp64 {shape.words}")
            try:
                self._judge(take_snapshot(step_without_dropout(spec), spec, shape.rate), shape)
            finally:
                clean_up()

    def _compare(self, subject: Subject, progress: Progress) -> float | None:
        """Compare the numerics of the very step that is measured; seconds of its first step."""
        own = next((shape for shape in self.shapes if self._is_own(shape)), None)
        if own is None:
            return None
        assert isinstance(subject.step, Step)
        progress("comparing with fp64")
        evidence = take_snapshot(subject.step, self.spec, own.rate)
        self._judge(evidence, own)
        return evidence.first_seconds

    def _is_own(self, shape: GateShape) -> bool:
        return not shape.apart and shape.spec == replace(self.spec, recipe=PLAIN)

    def _judge(self, evidence: NumericsSnapshot, shape: GateShape) -> None:
        """Add checks; stop at wrong numerics."""
        truth, *peers = load_references(self.references, shape.name, evidence.matmul_dtype)
        self.checks += judge(evidence, peers, truth, shape.words)
        if not all(check.passed for check in self.checks):
            raise RedGate

    def _afterwards(self, subject: Subject, run: Run) -> Run:
        """Bring the step back to its steady state and keep it."""
        self.subject = subject
        self._settle(lambda text: None)
        self.waits = tuple(sync_lines(subject))
        release_cache()
        return run

    def _settle(self, progress: Progress) -> None:
        assert self.subject is not None
        compiles = self.subject.step.parts.settle_steps
        settle(self.subject, compiles, progress)
        warm_up(self.subject, STEADY_STEPS if compiles else 1, progress)


def release_cache() -> None:
    """Give cached device memory back; weights and optimizer state stay."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _modules_by_op(subject: Subject) -> dict[str, tuple[str, ...]]:
    """Return the paths of the modules that declare an op, by op."""
    found: dict[str, tuple[str, ...]] = {}
    for path, module in subject.step.model.named_modules():
        if hasattr(module, "op") and hasattr(module, "ran"):
            op = str(module.op)
            found[op] = (*found.get(op, ()), path)
    return found
