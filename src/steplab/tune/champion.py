"""The best recipe so far, alive in its worker, with its profiled Run. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from steplab.core import Run
from steplab.core.errors import SteplabError
from steplab.profiling.output import read_traces, save_files, scratch_folder
from steplab.profiling.plan import ProfilePlan
from steplab.store import Store
from steplab.tune.op_times import op_times, phase_times
from steplab.verify.remote import CandidateResult, RemoteCandidate
from steplab.workers.client import Progress

# One step for the profiler's own start and some for the budget. A GPU repeats itself, and its
# traces are long: reading them takes longer than recording.
SCHEDULES = {"cpu": (0, 1, 3, 1), "cuda": (0, 1, 2, 1)}
Detail = Literal["none", "modules", "all"]


@dataclass(frozen=True)
class Champion:
    """`run` has a time budget, unless the profiler failed."""

    candidate: RemoteCandidate
    run: Run
    waits: tuple[str, ...]
    known_ms: Mapping[str, float]  # "op:", "idle:" (before its kernels) and "phase:" that it tells

    @property
    def memory(self) -> int | None:
        """Bytes at the peak."""
        return self.run.memory.peak if self.run.memory else None


def promote(
    candidate: RemoteCandidate,
    opened: CandidateResult,
    store: Store,
    timeout: float,
    progress: Progress,
    detail: Detail,
) -> Champion:
    """Profile a candidate that has won, store its Run with the traces, and return it.

    `detail`: with a step that tells modules and shapes, or also lines and memory, which takes
    longer than all the rest. A profiler that fails costs the ceilings, not the ladder.
    """
    with scratch_folder(store) as folder:
        try:
            run, traced = _profile(candidate, opened, folder, timeout, progress, detail)
            save_files(store, run, folder)
        except SteplabError as error:
            run, traced = opened.run, {}
            run = replace(run, notes=(*run.notes, f"no profile: {error}"))
            store.save(run)
    clock = run.clock
    assert clock is not None
    phases = {f"phase:{name}": samples.median for name, samples in clock.phases.items()}
    return Champion(candidate, run, opened.waits, {**traced, **phases})


def _profile(
    candidate: RemoteCandidate,
    opened: CandidateResult,
    folder: Path,
    timeout: float,
    progress: Progress,
    detail: Detail,
) -> tuple[Run, dict[str, float]]:
    plan = ProfilePlan(SCHEDULES[candidate.spec.device], detail != "none", stacks=detail == "all")
    run = candidate.record(opened.run, plan, folder, timeout, progress)
    progress("reading the traces")
    run, analysis = read_traces(run, folder)
    return run, {**op_times(run, analysis, opened.ops), **phase_times(run, analysis)}
