"""The Runs that the ranks of one group made of one step, as one Run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from steplab.core.run import Clock, Communication, Figures, RankResult, Run, Work
from steplab.core.samples import Samples

SYNC = "sync"  # the phase in which gradients of all ranks meet


def slowest(samples: Sequence[Samples]) -> Samples:
    """Return, step by step, the sample of the slowest rank: the others wait for it."""
    values = tuple(max(step) for step in zip(*(each.values for each in samples), strict=True))
    return Samples(values, samples[0].unit)


def merge_ranks(answers: Mapping[int, Run]) -> Run:
    """Return the Run of a step that ranks took part in, by what each of them saw.

    Times are those of the slowest rank, work is that of all, memory is the most of any; what only
    one rank can say (losses, which are means over all; what was compiled; kernels) is rank 0's.
    A rank that failed fails the Run.
    """
    for rank, run in answers.items():
        if run.status != "ok":
            return replace(run, reason=f"rank {rank}: {run.reason}")
    runs = [run for _, run in sorted(answers.items())]
    first, clocks = runs[0], [run.clock for run in runs if run.clock is not None]
    if len(clocks) < len(runs):
        return first
    clock = _slowest_clock(clocks)
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


def _slowest_clock(clocks: Sequence[Clock]) -> Clock:
    """Return rank 0's with the slowest rank's steps.

    Its window is such that they agree with it as well as on the rank where they agree least.
    """
    step = slowest([clock.step for clock in clocks])
    worst = max((clock.agreement for clock in clocks), key=lambda share: abs(share - 1))
    window_ms = sum(step.values) / worst if worst else 0.0
    return replace(clocks[0], step=step, window_ms=window_ms)


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
