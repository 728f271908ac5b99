"""Measured: rank 0 of N on the device that is here, in a group that does nothing.

Its kernels, its host and its memory are real; only what the ranks send to each other is modelled.
"""

from __future__ import annotations

from steplab.core import Run, RunSpec
from steplab.core.errors import MeasurementError, Unsupported
from steplab.techniques.recipes import PARALLEL
from steplab.workers.client import Worker, WorkerLost

TIMEOUT_S = 600.0


def measure_rank(spec: RunSpec) -> Run:
    """Measure rank 0 of the spec's ranks in a process of its own, on this machine."""
    if int(spec.recipe.techniques.get(PARALLEL, {}).get("expert", 1)) > 1:
        raise Unsupported(
            "Experts that are spread over ranks cannot be measured on one of them: it would wait "
            "for rows that nobody sends.",
            "Name a card instead of `here`, or leave out parallel.expert.",
        )
    try:
        with Worker() as worker:
            run = worker.call(f"{__name__}:be_first", Run, timeout=TIMEOUT_S, spec=spec)
    except WorkerLost as lost:
        raise MeasurementError(f"Rank 0 of {spec.ranks} {lost.status}: {lost.reason}.") from None
    if run.status != "ok":
        raise MeasurementError(f"Rank 0 of {spec.ranks}, {run.status}: {run.reason}")
    return run


def be_first(spec: RunSpec) -> Run:
    """Measure in this process, as rank 0 of ranks of which the others do not exist."""
    from steplab.parallel.silent import join_silent
    from steplab.parallel.world import leave
    from steplab.step.trial import trial

    if PARALLEL in spec.recipe.techniques:
        join_silent(spec.ranks)
    try:
        return trial(spec)
    finally:
        leave()
