"""A candidate: assembled, compared with the references, measured, and kept alive."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import torch

from steplab.core import Run, RunSpec, Samples
from steplab.core.ladder import Check, verdict, worst_check
from steplab.core.run import new_run
from steplab.probes.environment import capture_environment
from steplab.probes.probe import Subject
from steplab.profiling.plan import ProfilePlan
from steplab.profiling.recorder import STEADY_STEPS, record_profile
from steplab.step.assemble import assemble, micro_batches
from steplab.step.failures import failed_run
from steplab.step.graphed_call import SYNC_MESSAGE, sync_debug_mode
from steplab.step.loop import Progress, settle, time_steps, warm_up
from steplab.step.step import Step
from steplab.step.trial import ProbedStep, clean_up
from steplab.verify.draws import check_draws, take_draws
from steplab.verify.fp8_layers import check_fp8_products, check_fp8_range
from steplab.verify.judge import judge
from steplab.verify.numerics import (
    NumericsSnapshot,
    load_references,
    load_snapshot,
    reference_path,
    take_snapshot,
)
from steplab.verify.ranks import gather
from steplab.verify.references import snapshot_without_dropout
from steplab.verify.remote import CandidateResult, Recording
from steplab.verify.shapes import DRAWS, GateShape, at_shape, one_process


class NumericsFailed(Exception):
    """The numerics are wrong: there is nothing to measure."""


class Candidate:
    """One recipe in a process of its own, verified and measured, then kept alive."""

    def __init__(self, spec: RunSpec, shapes: tuple[GateShape, ...], references: Path) -> None:
        self.spec = spec
        self.shapes = tuple(s for s in shapes if not s.left_out)  # empty: nothing is verified
        self.references = references
        self.checks = [
            Check(f"numerics {s.words}", True, f"not compared: {s.left_out}")
            for s in shapes
            if s.left_out
        ]
        self.subject: Subject | None = None  # the step, once it has been measured

    def open(self, progress: Progress) -> CandidateResult:
        """Pass the gate's numerics, then measure; every failure is the Run's status."""
        empty = new_run(self.spec, capture_environment())
        try:
            self._verify_apart(progress)
            probed = ProbedStep(empty, progress)
            self._verify_products(probed.subject)
            first_seconds = self._verify_own(probed.subject, progress)
            run = probed.run_probes(progress, first_seconds)
            if run.status == "ok":
                return self._keep(probed.subject, run)
        except NumericsFailed:
            run = empty
        except Exception as error:
            run = failed_run(empty, error)
        return CandidateResult(run, tuple(self.checks))

    def measure(self, steps: int) -> Samples:
        """Time so many further steps, milliseconds each.

        Memory that only the steps need is given back: the other worker may need it.
        """
        assert self.subject is not None
        samples = time_steps(self.subject, steps)
        release_cache()
        return samples

    def record(self, run: Run, plan: ProfilePlan, folder: Path, progress: Progress) -> Recording:
        """Profile the step of this candidate's Run, with traces in `folder`."""
        assert self.subject is not None
        recorded = record_profile(self.subject, run, plan, folder, progress)
        _settle(self.subject, progress)
        release_cache()
        assert recorded.profile is not None
        return Recording(recorded.profile, recorded.notes)

    def _verify_apart(self, progress: Progress) -> None:
        """Compare numerics at other shapes than the measured one, or without dropout."""
        for shape in self.shapes:
            if self._is_own(shape):
                continue
            spec = at_shape(self.spec, shape)
            progress(f"comparing with the truth {shape.words}")
            try:
                chosen = shape.chosen_batch
                snapshot = snapshot_without_dropout(spec, shape.rate, chosen_batch=chosen)
                self._judge(snapshot, shape)
                if shape.apart and not self._is_measured(shape):
                    self._check_draws(assemble(spec, chosen_batch=chosen), spec, shape)
            finally:
                clean_up()

    def _verify_products(self, subject: Subject) -> None:
        """Compare fp8 products, where there are any, with fp64 ones of the same rounded operands.

        Against unrounded ones a product that is wrong by a rounding could not be told from fp8.
        What fp8 cannot hold is counted in a step that is not measured.
        """
        parts = subject.step.parts
        if not self.shapes or not parts.fp8_linears:
            return
        spec = at_shape(self.spec, self.shapes[0])
        try:
            step = assemble(spec, chosen_batch=self.shapes[0].chosen_batch)
            in_range = check_fp8_range(step, next(micro_batches(step, spec))[0])
        finally:
            clean_up()
        self.checks += (check_fp8_products(parts), in_range)
        if not all(check.passed for check in self.checks):
            raise NumericsFailed

    def _verify_own(self, subject: Subject, progress: Progress) -> float | None:
        """Compare the numerics of the very step that is measured; seconds of its first step."""
        own = next((shape for shape in self.shapes if self._is_measured(shape)), None)
        if own is None:
            return None
        assert isinstance(subject.step, Step)
        if own.apart:
            progress("comparing what is dropped")
            return self._check_draws(subject.step, self.spec, own)
        progress("comparing with the truth")
        snapshot = take_snapshot(subject.step, self.spec, own.rate, fixed_fills=False)
        self._judge(snapshot, own)
        return snapshot.first_seconds

    def _is_own(self, shape: GateShape) -> bool:
        return not shape.apart and self._is_measured(shape)

    def _is_measured(self, shape: GateShape) -> bool:
        return shape.spec == one_process(self.spec)

    def _check_draws(self, step: Step, spec: RunSpec, shape: GateShape) -> float | None:
        """Compare what the step drops with what the plain one drops; seconds of its first step.

        Ranks draw apart, each for itself, and are left alone.
        """
        if spec.ranks > 1:
            return None
        found = take_draws(step, spec)
        plain = load_snapshot(reference_path(self.references, shape.name, DRAWS))
        self.checks.append(check_draws(found, plain))
        if not self.checks[-1].passed:
            raise NumericsFailed
        return found.first_seconds

    def _judge(self, snapshot: NumericsSnapshot, shape: GateShape) -> None:
        """Add checks; stop at wrong numerics. All ranks go by what the first one found."""
        truth, *peers = load_references(self.references, shape.name, snapshot.rounding)
        checks = judge(snapshot, peers, truth, shape.words)
        self.checks += gather(checks, self.spec.ranks)[0]
        if not all(check.passed for check in self.checks):
            raise NumericsFailed

    def _keep(self, subject: Subject, run: Run) -> CandidateResult:
        """Bring the step back to its steady state and keep it."""
        _settle(subject, lambda text: None)
        waits = tuple(sync_lines(subject))
        release_cache()
        self.subject = subject
        return CandidateResult(run, tuple(self.checks), waits, _modules_by_op(subject))


def verified_trial(
    spec: RunSpec, shapes: tuple[GateShape, ...], references: Path, progress: Progress
) -> Run:
    """Measure `spec` after the gate, whose verdict is in the Run; a red one fails it."""
    try:
        result = Candidate(spec, shapes, references).open(progress)
    finally:
        clean_up()
    run = replace(result.run, verdict=verdict(result.checks))
    wrong = worst_check(result.checks)
    if wrong is None:
        return run
    return replace(run, status="failed", reason=f"{wrong.name}: {wrong.detail}")


def _settle(subject: Subject, progress: Progress) -> None:
    compiles = subject.step.parts.settle_steps
    settle(subject, compiles, progress)
    warm_up(subject, STEADY_STEPS if compiles else 1, progress)


def preload() -> None:
    """Have everything imported that a candidate needs, and the GPU opened where there is one."""
    if torch.cuda.is_available():
        from torch._inductor import compile_fx  # noqa: F401

        torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")


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


def sync_lines(subject: Subject) -> list[str]:
    """Run one step and return `folder/file.py:12` for every wait; nothing without a GPU."""
    if not subject.on_cuda:
        return []
    batch = next(subject.feed)  # what fetching it waits for is not part of the step
    with warnings.catch_warnings(record=True) as seen, sync_debug_mode("warn"):
        warnings.simplefilter("always")
        subject.step(batch)
    waits = [w for w in seen if SYNC_MESSAGE in str(w.message)]
    return [f"{'/'.join(Path(w.filename).parts[-2:])}:{w.lineno}" for w in waits]
