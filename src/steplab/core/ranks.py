"""The Runs that the ranks of one group made of one step, as one Run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from steplab.core.run import Clock, Communication, Figures, RankResult, Run, Work
from steplab.core.samples import Samples

SYNC = "sync"  # the phase in which gradients of all ranks meet


def slowest(samples: Sequence[Samples]) -> Samples:
    """Return, step by step, the sample of the slowest rank: the others wait for it."""
    values = tuple(max(step) for step in zip(*(each.values for each in samples), strict=True))
    return Samples(values, samples[0].unit)


def merge_ranks(runs: Sequence[Run]) -> Run:
    """Return the Run of a step that all of these ranks, in order, took part in.

    Times are those of the slowest rank, work is that of all, memory is the most of any; what only
    one rank can say (losses, which are means over all; what was compiled; kernels) is rank 0's.
    A rank that failed fails the Run.
    """
    first = runs[0]
    for rank, run in enumerate(runs):
        if run.status != "ok":
            return replace(first, status=run.status, reason=f"rank {rank}: {run.reason}")
    clocks = [run.clock for run in runs if run.clock is not None]
    if len(clocks) < len(runs):
        return first
    clock = replace(first.clock or clocks[0], step=slowest([each.step for each in clocks]))
    memories = [run.memory for run in runs if run.memory is not None]
    return replace(
        first,
        clock=clock,
        memory=max(memories, key=lambda memory: memory.peak, default=None),
        communication=_most_held(runs),
        work=_all_work(runs),
        figures=_slower(first.figures, clocks[0], clock),
        notes=_notes(runs),
        ranks=tuple(_result(run) for run in runs),
    )


def _result(run: Run) -> RankResult:
    assert run.clock is not None
    sync = run.clock.phases.get(SYNC)
    return RankResult(
        step_ms=run.clock.step.median,
        sync_ms=sync.median if sync and sync.values else 0.0,
        exposed_ms=run.ran.exposed_communication_ms if run.ran else 0.0,
        peak_bytes=run.memory.peak if run.memory else None,
        parameters=run.parameters,
    )


def _most_held(runs: Sequence[Run]) -> Communication | None:
    """Return what rank 0 sends, with the most that any rank holds."""
    found = [run.communication for run in runs if run.communication is not None]
    if not found:
        return None
    kinds = found[0].held_bytes
    most = {kind: max(each.held_bytes[kind] for each in found) for kind in kinds}
    return replace(found[0], held_bytes=most)


def _all_work(runs: Sequence[Run]) -> Work | None:
    works = [run.work for run in runs]
    first = works[0]
    if first is None:
        return None

    def total(name: str) -> float | None:
        counts = [getattr(work, name) for work in works]
        return None if None in counts else sum(counts)

    return replace(
        first,
        tokens=sum(work.tokens for work in works if work is not None),
        model=total("model"),
        palm=total("palm"),
        hardware=total("hardware"),
        vector=total("vector") or 0.0,
    )


def _slower(figures: Figures | None, own: Clock, merged: Clock) -> Figures | None:
    """Scale rank 0's shares of the peak to the time of the slowest rank."""
    if figures is None or not merged.step.median:
        return figures
    scale = own.step.median / merged.step.median

    def scaled(share: float | None) -> float | None:
        return None if share is None else share * scale

    return replace(
        figures,
        mfu=scaled(figures.mfu),
        mfu_palm=scaled(figures.mfu_palm),
        hfu=scaled(figures.hfu),
    )


def _notes(runs: Sequence[Run]) -> tuple[str, ...]:
    """Return the notes of all ranks; of those about one thing, the first rank's."""
    by_subject: dict[str, str] = {}
    for run in runs:
        for note in run.notes:
            by_subject.setdefault(note.split(":")[0], note)
    return tuple(by_subject.values())
