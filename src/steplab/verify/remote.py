"""The gate seen from the parent: candidates and references in worker processes. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from steplab.core import Environment, Run, RunSpec, Samples, new_run_id
from steplab.core.codec import decode, encode
from steplab.core.errors import MeasurementError, SteplabError, Unsupported
from steplab.core.ladder import Check
from steplab.core.run import now
from steplab.profiling.plan import ProfilePlan
from steplab.verify.shapes import GateShape
from steplab.workers.client import Progress, Worker, WorkerLost
from steplab.workers.pool import WorkerPool


@dataclass(frozen=True)
class CandidateResult:
    """A Run of status ok but without a clock was stopped by its numerics."""

    run: Run
    checks: tuple[Check, ...] = ()  # of the numerics
    waits: tuple[str, ...] = ()  # lines in which the host waited for the device
    ops: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # op -> paths of its modules


class RemoteCandidate:
    """A candidate that lives in a worker of its own until it is closed."""

    def __init__(self, spec: RunSpec, environment: Environment, spares: WorkerPool) -> None:
        self.spec = spec
        self.environment = environment
        self.worker = spares.take()

    def open(
        self, shapes: Sequence[GateShape], references: Path, timeout: float, progress: Progress
    ) -> CandidateResult:
        """Let it pass the gate and be measured; a worker that is lost is the Run's status."""
        request = {"do": "candidate", "spec": encode(self.spec), "shapes": encode(list(shapes))}
        request["references"] = str(references.resolve())
        blank = Run(new_run_id(self.spec), self.spec, self.environment, created=now())
        try:
            answer = self.worker.ask(request, timeout, progress)
            opened: CandidateResult = decode(CandidateResult, answer, "candidate")
        except WorkerLost as lost:
            return CandidateResult(replace(blank, status=lost.status, reason=lost.reason))
        except SteplabError as error:
            status: Any = "unsupported" if isinstance(error, Unsupported) else "failed"
            return CandidateResult(replace(blank, status=status, reason=str(error)))
        return opened

    def turn(self, steps: int, timeout: float) -> Samples:
        """Time so many steps."""
        samples: Samples = decode(Samples, self._ask({"do": "turn", "steps": steps}, timeout), "ms")
        return samples

    def record(
        self, run: Run, plan: ProfilePlan, folder: Path, timeout: float, progress: Progress
    ) -> Run:
        """Profile it, the traces into `folder`."""
        request = {"do": "record", "run": encode(run), "plan": encode(plan)}
        request["folder"] = str(folder.resolve())
        recorded: Run = decode(Run, self._ask(request, timeout, progress), "run")
        return recorded

    def close(self) -> None:
        """End its process."""
        self.worker.close()

    def _ask(self, request: dict[str, Any], timeout: float, progress: Any = None) -> Any:
        try:
            return self.worker.ask(request, timeout, progress or (lambda text: None))
        except WorkerLost as lost:
            raise MeasurementError(f"A worker was lost: {lost.reason}.") from None


class ReferenceWorker:
    """Makes the references of the gate and looks at recipes; started anew when it is lost."""

    def __init__(self) -> None:
        self.references = Path()  # the folder of the references; set before any is asked for
        self.worker = Worker()

    def environment(self, timeout: float) -> Environment:
        """Ask what this machine is."""
        try:
            answer = self.worker.ask({"do": "environment"}, timeout)
        except WorkerLost as lost:
            raise MeasurementError(f"The worker process does not start: {lost.reason}.") from None
        found: Environment = decode(Environment, answer, "environment")
        return found

    def reference(self, shape: GateShape, dtype: str, timeout: float) -> str:
        """Have one reference written; return why it cannot be had, or ""."""
        return self._ask_of("reference", shape, dtype, timeout)

    def cannot_tell(self, shape: GateShape, dtype: str, timeout: float) -> str:
        """Return why even an honest update would not pass by the references made; or ""."""
        return self._ask_of("tell", shape, dtype, timeout)

    def has_dropout(self, spec: RunSpec, timeout: float) -> bool:
        """Whether the model drops something at random."""
        return self._ask({"do": "dropout", "spec": encode(spec)}, timeout) is True

    def look(self, spec: RunSpec, shape: GateShape, timeout: float) -> tuple[str, str]:
        """Return (the dtype that a recipe declares, why it cannot run here or "")."""
        request = {"do": "look", "spec": encode(spec), "shape": encode(shape)}
        try:
            answer = self._ask(request, timeout)
        except SteplabError as error:
            return "", str(error)
        return (answer["dtype"], "") if isinstance(answer, dict) else ("", str(answer))

    def close(self) -> None:
        """End its process."""
        self.worker.close()

    def _ask_of(self, what: str, shape: GateShape, dtype: str, timeout: float) -> str:
        request = {"do": what, "shape": encode(shape), "dtype": dtype}
        request["references"] = str(self.references.resolve())
        return str(self._ask(request, timeout))

    def _ask(self, request: dict[str, Any], timeout: float) -> Any:
        """Return the answer, or how the worker was lost; then the next question finds a new one."""
        try:
            return self.worker.ask(request, timeout)
        except WorkerLost as lost:
            self.worker.close()
            self.worker = Worker()
            return f"{lost.status}: {lost.reason}"
