"""Runs steps under torch's profiler and leaves traces behind."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from steplab.engine.loop import Progress, synchronise
from steplab.engine.profiling.plan import AVERAGES, DETAIL, Plan
from steplab.engine.profiling.ranges import (
    can_name_modules,
    module_ranges,
    phase_ranges,
    run_named,
)
from steplab.engine.profiling.trace_file import write_averages, write_trace
from steplab.probes.probe import Subject
from steplab.trace.phases import PACE

DETAIL_WARMUP = 1  # the first step under the Python tracer pays for its start


def record_lean(subject: Subject, plan: Plan, folder: Path, progress: Progress) -> tuple[str, ...]:
    """Run `plan.steps` steps and write one trace per cycle; return the files' names.

    Nothing but phases is recorded, so that times stay close to those without a profiler. The
    table of averages holds the active steps of all cycles.
    """
    names: list[str] = []

    def save(profiler: profile) -> None:
        names.append(f"trace_{len(names) + 1}.json.gz")
        write_trace(profiler, folder / names[-1])

    progress(f"tracing {plan.steps} steps")
    pace = Pace(subject.on_cuda)
    with (
        phase_ranges(subject),
        profile(
            activities=_activities(subject.on_cuda),
            schedule=_schedule(plan),
            on_trace_ready=save,
            acc_events=True,
        ) as profiler,
    ):
        for _ in range(plan.steps):
            run_named(subject, then=pace.step_issued)
            profiler.step()
    write_averages(profiler, folder / AVERAGES, subject.on_cuda)
    return tuple(names)


def record_detail(subject: Subject, folder: Path, progress: Progress, stacks: bool = True) -> str:
    """Record one step with shapes, modules and, with `stacks`, Python's lines and memory.

    Returns the file's name.
    """
    progress("tracing in detail")
    model = subject.step.model
    with (
        phase_ranges(subject),
        module_ranges(model) if can_name_modules(model) else contextlib.nullcontext(),
        profile(
            activities=_activities(subject.on_cuda),
            schedule=schedule(wait=0, warmup=DETAIL_WARMUP, active=1, repeat=1),
            on_trace_ready=lambda profiler: write_trace(profiler, folder / DETAIL),
            with_stack=stacks,
            record_shapes=True,
            profile_memory=stacks,
            acc_events=True,
        ) as profiler,
    ):
        for _ in range(DETAIL_WARMUP + 1):
            # No kernel of one step may run in the range of the next.
            run_named(subject, then=lambda: synchronise(subject))
            profiler.step()
    return DETAIL


class Pace:
    """Keeps the host one step ahead of the device, and no further.

    A host that is free to run ahead issues several steps within the first one's time on the
    device, and its step ranges then say nothing about how long a step takes. The wait is for
    the step before: while it lasts the device has the present step's work to do.
    """

    def __init__(self, on_cuda: bool) -> None:
        self.on_cuda = on_cuda
        self.before: Any = None

    def step_issued(self) -> None:
        """Wait until the step before the one just issued is done."""
        if not self.on_cuda:
            return
        done = torch.cuda.Event()
        done.record()
        if self.before is not None:
            with record_function(PACE):
                self.before.synchronize()
        self.before = done


def _activities(on_cuda: bool) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_cuda else [])


def _schedule(plan: Plan) -> Callable[[int], Any]:
    with warnings.catch_warnings():
        # A schedule without warm-up is noted in the Run instead.
        warnings.filterwarnings("ignore", "Profiler won't be using warmup")
        made: Callable[[int], Any] = schedule(
            wait=plan.wait, warmup=plan.warmup, active=plan.active, repeat=plan.repeat
        )
    return made
