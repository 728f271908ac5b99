"""The champion: the best recipe so far, alive in its worker, with its profiled Run. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from steplab.core import Run, RunSpec
from steplab.core.errors import MeasurementError, SteplabError, Unsupported
from steplab.core.ladder import Check, Ladder, worst_check
from steplab.profiling.output import read_traces, save_files, scratch_folder
from steplab.profiling.plan import ProfilePlan
from steplab.store import Store
from steplab.techniques.recipes import technique
from steplab.tune.ceilings import op_times, phase_times
from steplab.tune.options import GateOptions
from steplab.verify.checks import run_checks
from steplab.verify.remote import CandidateResult, RemoteCandidate
from steplab.workers.client import Progress

# One step for the profiler's own start and some for the budget. A GPU repeats itself, and its
# traces are long: reading them takes longer than recording.
SCHEDULES = {"cpu": (0, 1, 3, 1), "cuda": (0, 1, 2, 1)}
# Whether a further step is recorded: not at all, with modules and shapes, or also with lines and
# memory, which takes longer than all the rest.
Detail = Literal["none", "modules", "all"]


@dataclass(frozen=True)
class Champion:
    """`run` has a time budget, unless the profiler failed."""

    candidate: RemoteCandidate
    run: Run
    waits: tuple[str, ...]  # lines in which the host waits for the device
    known_ms: Mapping[str, float]  # its "op:", "idle:" (before its kernels) and "phase:" times
    checks: tuple[Check, ...] = ()  # its own way through the gate

    @property
    def memory(self) -> int | None:
        """Bytes at the peak."""
        return self.run.memory.peak if self.run.memory else None


def open_champion(
    spec: RunSpec,
    ladder: Ladder,
    gate: GateOptions,
    store: Store,
    timeout: float,
    progress: Progress,
    detail: Detail,
) -> Champion:
    """Verify, measure and profile a recipe without which the search of `ladder` cannot go on."""
    with ExitStack() as stack:
        candidate = stack.enter_context(RemoteCandidate(spec, ladder.environment, gate.pool))
        result = candidate.open(gate.shapes, gate.references, timeout, progress)
        _raise_failure(result)
        result = replace(result, run=replace(result.run, group=ladder.id))
        checks = (*result.checks, *run_checks(result.run, result.waits, result.waits, None))
        champion = promote(candidate, result, store, timeout, progress, detail)
        stack.pop_all()  # it stays alive
        return replace(champion, checks=checks)


def _raise_failure(result: CandidateResult) -> None:
    run = result.run
    if run.status != "ok":
        kind = Unsupported if run.status == "unsupported" else MeasurementError
        recipe = run.spec.recipe
        remedies = [technique(name).remedy(run) for name in recipe.techniques]
        remedy = next(filter(None, remedies), "") if run.status == "oom" else ""
        if run.status == "timeout":
            remedy = "a larger --budget, or a smaller --batch"
        raise kind(
            f"The recipe {recipe.label} cannot be measured: {run.status}, {run.reason}",
            remedy and f"Try {remedy}.",
        )
    wrong = worst_check(result.checks)
    if wrong is not None:
        raise MeasurementError(
            f"No speed-up could be verified: the gate is red for {run.spec.recipe.label} itself "
            f"({wrong.name}: {wrong.detail})."
        )


def promote(
    candidate: RemoteCandidate,
    result: CandidateResult,
    store: Store,
    timeout: float,
    progress: Progress,
    detail: Detail,
) -> Champion:
    """Profile a candidate that has won, store its Run with the traces, and return it.

    A profiler that fails costs the ceilings, not the ladder.
    """
    with scratch_folder(store) as folder:
        try:
            run, traced = _profile(candidate, result, folder, timeout, progress, detail)
            save_files(store, run, folder)
        except SteplabError as error:
            run, traced = result.run, {}
            run = replace(run, notes=(*run.notes, f"no profile: {error}"))
            store.save(run)
    assert run.clock is not None
    phases = {f"phase:{name}": samples.median for name, samples in run.clock.phases.items()}
    return Champion(candidate, run, result.waits, {**traced, **phases})


def _profile(
    candidate: RemoteCandidate,
    result: CandidateResult,
    folder: Path,
    timeout: float,
    progress: Progress,
    detail: Detail,
) -> tuple[Run, dict[str, float]]:
    """Return the Run with its profile, and the ms of its ops and phases."""
    plan = ProfilePlan(SCHEDULES[candidate.spec.device], detail != "none", stacks=detail == "all")
    run = candidate.record(result.run, plan, folder, timeout, progress)
    progress("reading the traces")
    run, analysis = read_traces(run, folder)
    return run, {**op_times(run, analysis, result.ops), **phase_times(run, analysis)}
