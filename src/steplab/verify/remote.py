"""The gate seen from the parent: candidates and references in worker processes. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from steplab.core import Environment, Profile, Run, RunSpec, Status
from steplab.core.errors import MeasurementError, SteplabError, Unsupported
from steplab.core.ladder import Check
from steplab.core.ranks import merge_ranks
from steplab.core.run import new_run
from steplab.profiling.output import rank_folders
from steplab.profiling.plan import ProfilePlan
from steplab.verify.shapes import (
    LIKELY_DTYPES,
    SMALLER_RATES,
    TRUTH,
    GateShape,
    with_rate_of,
    with_smaller_steps,
)
from steplab.workers.alternate import RemoteStep
from steplab.workers.client import Progress, Worker, WorkerLost, WorkerOwner
from steplab.workers.pool import WorkerPool

CANDIDATE = "steplab.verify.candidate:Candidate"
MAKE_REFERENCES = "steplab.verify.references:make_references"
WHY_UNDECIDED = "steplab.verify.references:why_undecided"
HAS_DROPOUT = "steplab.verify.references:has_dropout"
CHECK_CURVES = "steplab.verify.curves:check_curves"
DRY_RUN = "steplab.verify.references:dry_run"
MAKING_REFERENCES = "computing the references"  # a stage that a search has once per dtype

T = TypeVar("T")


@dataclass(frozen=True)
class CandidateResult:
    """What opening a candidate has shown; a Run of status ok without a clock failed numerics."""

    run: Run
    checks: tuple[Check, ...] = ()  # of the numerics
    waits: tuple[str, ...] = ()  # lines in which the host waited for the device
    ops: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # op -> paths of its modules

    @property
    def status(self) -> Status:
        """That of its Run."""
        return self.run.status

    @classmethod
    def of_ranks(cls, results: Mapping[int, CandidateResult]) -> CandidateResult:
        """Return what all ranks have shown together: a check that is red on one of them is red."""
        checks: dict[str, Check] = {}
        for result in results.values():
            for check in result.checks:
                if check.name not in checks or not check.passed:
                    checks[check.name] = check
        return cls(
            merge_ranks({rank: result.run for rank, result in results.items()}),
            tuple(checks.values()),
            max((result.waits for result in results.values()), key=len),
            results[min(results)].ops,
        )


@dataclass(frozen=True)
class Recording:
    """The profile of a candidate, and the notes of its Run with those that this adds."""

    profile: Profile
    notes: tuple[str, ...]


class RemoteCandidate(RemoteStep):
    """A candidate that lives in a worker of its own until the `with` block ends."""

    def __init__(self, spec: RunSpec, environment: Environment, pool: WorkerPool) -> None:
        super().__init__(pool.take())
        self.spec = spec
        self.environment = environment

    def open(
        self, shapes: Sequence[GateShape], references: Path, timeout: float, progress: Progress
    ) -> CandidateResult:
        """Verify it at the shapes, then measure it; a worker that is lost is the Run's status."""
        worker, arguments = self.worker, {"shapes": tuple(shapes), "references": references}
        try:
            worker.keep(CANDIDATE, timeout=timeout, spec=self.spec, **arguments)
            return worker.call(".open", CandidateResult, timeout=timeout, progress=progress)
        except WorkerLost as lost:
            return self._failed(lost.status, lost.reason)
        except SteplabError as error:
            return self._failed(
                "unsupported" if isinstance(error, Unsupported) else "failed", str(error)
            )

    def record(
        self, run: Run, plan: ProfilePlan, folder: Path, timeout: float, progress: Progress
    ) -> Run:
        """Profile it; the traces are written into `folder`."""
        with rank_folders(folder, self.spec.ranks) as folders:
            arguments = {"run": run, "plan": plan, "folder": folders}
            found = self.call(".record", Recording, timeout, progress, **arguments)
        return replace(run, profile=found.profile, notes=found.notes)

    def _failed(self, status: Status, reason: str) -> CandidateResult:
        run = new_run(self.spec, self.environment)
        return CandidateResult(replace(run, status=status, reason=reason))


class ReferenceWorker(WorkerOwner):
    """Computes the references of the gate and dry-runs recipes; restarted when it is lost.

    Its process is never measured.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path()  # where the references are; set before any is asked for

    def environment(self, timeout: float) -> Environment:
        """Return what this machine is."""
        return self.worker.environment(timeout)

    def reference(self, shape: GateShape, dtype: str, timeout: float) -> str:
        """Write what candidates of `dtype` are judged by; return why it cannot be had, or ""."""
        try:
            return self._call(MAKE_REFERENCES, str, timeout, **self._asked(shape, dtype))
        except WorkerLost as lost:
            return _sentence(lost)

    def why_undecided(self, shape: GateShape, dtype: str, timeout: float) -> str:
        """Return why even an honest step would not pass by the references made; or ""."""
        try:
            return self._call(WHY_UNDECIDED, str, timeout, **self._asked(shape, dtype))
        except WorkerLost as lost:
            return _sentence(lost)

    def has_dropout(self, spec: RunSpec, timeout: float) -> bool:
        """Whether the model drops something at random."""
        try:
            return self._call(HAS_DROPOUT, bool, timeout, spec=spec)
        except WorkerLost:
            return False

    def check_curves(self, spec: RunSpec, timeout: float) -> tuple[Check, ...]:
        """Compare many steps of a recipe with the plain step's, at a small shape."""
        arguments = {"spec": spec, "folder": self.folder}
        try:
            return self._call(CHECK_CURVES, tuple[Check, ...], timeout, **arguments)
        except WorkerLost as lost:
            return (Check("curves", False, f"unverified: {_sentence(lost)}"),)
        except SteplabError as error:
            return (Check("curves", False, f"unverified: {error}"),)

    def dry_run(
        self, spec: RunSpec, shape: GateShape, timeout: float
    ) -> tuple[str, SteplabError | None]:
        """Return (the dtype that a recipe declares, why it cannot run here or None)."""
        try:
            return self._call(DRY_RUN, str, timeout, spec=spec, shape=shape), None
        except WorkerLost as lost:
            return "", MeasurementError(_sentence(lost))
        except SteplabError as error:
            return "", error

    def prepare(
        self, spec: RunSpec, shapes: Sequence[GateShape], timeout: float, progress: Progress
    ) -> tuple[tuple[GateShape, ...], SteplabError | None]:
        """Dry-run a recipe and compute its references.

        Return the shapes at which it is compared, and why it cannot be tried, or None. The shapes
        are chosen for LIKELY_DTYPES; for a recipe that rounds more they get smaller steps, where
        only after these right and wrong differ. An extra shape that cannot tell says why, and is
        left out.
        """
        progress("dry-running it")
        rounding, problem = self.dry_run(spec, shapes[0], timeout)
        progress(MAKING_REFERENCES)
        first = tuple(shape for shape in shapes if not shape.extra)
        chosen, problem = self._decisive(spec, first, rounding, problem, timeout)
        if problem:
            return tuple(shapes), problem
        beside = [with_rate_of(shape, chosen[0]) for shape in shapes if shape.extra]
        reasons = [self._why_unclear(spec, shape, rounding, timeout) for shape in beside]
        told = (replace(s, left_out=why) for s, why in zip(beside, reasons, strict=True))
        return (*chosen, *told), None

    def _decisive(
        self,
        spec: RunSpec,
        shapes: tuple[GateShape, ...],
        rounding: str,
        problem: SteplabError | None,
        timeout: float,
    ) -> tuple[tuple[GateShape, ...], SteplabError | None]:
        """Return the shapes with steps after which right and wrong differ; or the problem."""
        tried = shapes
        for _ in range(1 + SMALLER_RATES):
            wanted = ((shape, name) for shape in tried for name in (TRUTH, rounding))
            problem = problem or self._first_problem(wanted, timeout)
            if problem or rounding in LIKELY_DTYPES or spec.mode != "full":
                return shapes, problem
            if not any(self.why_undecided(shape, rounding, timeout) for shape in tried):
                return tried, None
            tried = tuple(with_smaller_steps(shape) for shape in tried)
        return shapes, None  # the gate will say that it is unverified

    def _why_unclear(self, spec: RunSpec, shape: GateShape, rounding: str, timeout: float) -> str:
        """Return why a recipe that rounds so cannot be judged at a shape, or ""."""
        problem = self._first_problem(((shape, n) for n in (TRUTH, rounding)), timeout)
        if problem or spec.mode != "full":
            return problem.message if problem else ""
        return self.why_undecided(shape, rounding, timeout)

    def _first_problem(
        self, wanted: Iterable[tuple[GateShape, str]], timeout: float
    ) -> MeasurementError | None:
        problems = (self.reference(shape, name, timeout) for shape, name in wanted)
        return next((MeasurementError(problem) for problem in problems if problem), None)

    def _asked(self, shape: GateShape, dtype: str) -> dict[str, Any]:
        return {"shape": shape, "dtype": dtype, "folder": self.folder}

    def _call(self, function: str, returns: type[T], timeout: float, **arguments: Any) -> T:
        """Call a function; after a worker that is lost there is a new one."""
        try:
            return self.worker.call(function, returns, timeout=timeout, **arguments)
        except WorkerLost:
            self.worker.close()
            self.worker = Worker()
            raise


def _sentence(lost: WorkerLost) -> str:
    return f"{lost.status}: {lost.reason}"
