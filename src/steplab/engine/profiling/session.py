"""One spec measured like any trial, then recorded: times first, without a profiler around."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from steplab.engine.loop import Progress, settle, warm_up
from steplab.engine.profiling.graphs_off import cuda_graphs_off
from steplab.engine.profiling.plan import Plan
from steplab.engine.profiling.ranges import can_name_modules
from steplab.engine.profiling.recorder import record_detail, record_lean
from steplab.engine.trial import is_out_of_memory, trial
from steplab.errors import SteplabError
from steplab.probes.memory_timeline import record_memory
from steplab.probes.probe import Subject
from steplab.record import MemoryTimeline, Profile, Run
from steplab.spec import RunSpec

# Inductor warms a CUDA graph up in the first step after a reset and records it in the second.
STEADY_STEPS = 3


def profile_spec(spec: RunSpec, plan: Plan, folder: Path, progress: Progress) -> Run:
    """Measure and record `spec` in this process; traces are written into `folder`.

    UserErrors propagate; every other failure is the Run's status.
    """

    def afterwards(subject: Subject, run: Run) -> Run:
        _steady(subject, progress)
        return record(subject, run, plan, folder, progress)

    return trial(spec, progress, afterwards)


def record(subject: Subject, run: Run, plan: Plan, folder: Path, progress: Progress) -> Run:
    """Add a profile to the Run of a step that has been measured and is in its steady state."""
    notes = [*run.notes]
    if not plan.warmup:
        notes.append("schedule without warm-up: recorded steps hold the profiler's own start")
    traces = record_lean(subject, plan, folder, progress)
    profile = Profile(plan.numbers, traces, updated_weights=updated_weights(subject))
    if plan.detail:
        try:
            profile = _detailed(subject, run, profile, plan.stacks, folder, progress, notes)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            notes.append("no detail: the step with stacks, shapes and memory ran out of memory")
    return replace(run, profile=profile, notes=tuple(notes))


def updated_weights(subject: Subject) -> int | None:
    """Return the number of weights that a step updates; None where nobody knows the optimizer."""
    optimizer = subject.step.optimizer
    if optimizer is None or subject.spec.mode != "full":
        return None
    params = (p for group in optimizer.param_groups for p in group["params"])
    return sum(p.numel() for p in params if p.requires_grad)


def _detailed(
    subject: Subject,
    run: Run,
    profile: Profile,
    stacks: bool,
    folder: Path,
    progress: Progress,
    notes: list[str],
) -> Profile:
    """Return the profile with a detailed step and its memory; add to `notes` what limits them.

    Without `stacks` only modules and shapes are told.
    """
    replays = run.ran is not None and bool(run.ran.graph_launches)
    with contextlib.ExitStack() as stack:
        if replays:
            stack.enter_context(cuda_graphs_off())
            stack.enter_context(subject.op_by_op())
            notes.append("detail and memory were recorded with CUDA graphs off")
            _steady(subject, progress)
        detail = record_detail(subject, folder, progress, stacks)
        if not can_name_modules(subject.step.model):
            notes.append("no module ranges: it is not known what is compiled; stacks tell")
        memory = _memory(subject, progress, notes) if stacks else None
    return replace(profile, detail=detail, memory=memory)


def _memory(subject: Subject, progress: Progress, notes: list[str]) -> MemoryTimeline | None:
    progress("following the memory")
    try:
        return record_memory(subject)
    except SteplabError as error:
        notes.append(f"no memory timeline: {error}")
    except UnicodeDecodeError:
        # A step that compiles while stacks are recorded frees code whose names are then garbage.
        notes.append("no memory timeline: torch's profiler could not name freed code")
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        notes.append("no memory timeline: following the step ran out of memory")
    return None


def _steady(subject: Subject, progress: Progress) -> None:
    """Bring the step back to its steady state: whoever looked at it last may have reset it."""
    settle(subject, subject.step.parts.settle_steps, progress)
    warm_up(subject, STEADY_STEPS, progress)
