"""Records a step: lean traces for its times, then one step in detail for who did what.

The step is measured first, like any trial, without a profiler around it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config
from torch.profiler import profile, record_function, schedule

from steplab.core import MemoryTimeline, Profile, Run, RunSpec
from steplab.core.errors import SteplabError
from steplab.probes.compilation import graph_count
from steplab.probes.dataflow import record_dataflow
from steplab.probes.line_ranges import line_ranges
from steplab.probes.memory import graph_pools
from steplab.probes.memory_timeline import record_memory
from steplab.probes.probe import Subject
from steplab.probes.ran import RawProfile, profiler_activities
from steplab.probes.switches import given_to_compile, optimizer_shapes, setup_lines, switches_on
from steplab.profiling.plan import AVERAGES_FILE, DETAIL_FILE, ProfilePlan
from steplab.profiling.ranges import (
    can_name_modules,
    check_range,
    module_ranges,
    phase_ranges,
    run_named,
)
from steplab.profiling.trace_file import write_averages, write_trace
from steplab.step.failures import error_sentence, is_out_of_memory
from steplab.step.loop import Progress, settle, synchronize, warm_up
from steplab.step.trial import trial
from steplab.trace.phases import PACING_RANGE

DETAIL_WARMUP = 1  # the first step under the Python tracer also pays for starting it
# Inductor warms a CUDA graph up in the first step after a reset and records it in the second.
STEADY_STEPS = 3


def profile_spec(spec: RunSpec, plan: ProfilePlan, folder: Path, progress: Progress) -> Run:
    """Measure and record `spec` in this process; traces are written into `folder`.

    UserErrors propagate; every other failure is the Run's status.
    """

    def afterwards(subject: Subject, run: Run) -> Run:
        _reach_steady_state(subject, progress)
        return record_profile(subject, run, plan, folder, progress)

    def beforehand(subject: Subject) -> None:
        if plan.shown:
            check_range(plan.shown, subject.step.model)

    return trial(spec, progress, afterwards, beforehand)


def record_profile(
    subject: Subject, run: Run, plan: ProfilePlan, folder: Path, progress: Progress
) -> Run:
    """Add a profile to the Run of a step that has been measured and is in its steady state."""
    notes = [*run.notes]
    if not plan.warmup:
        notes.append(
            "schedule without warm-up: the recorded steps contain the start of the profiler"
        )
    traces = record_lean(subject, plan, folder, progress)
    profile = Profile(
        plan.numbers,
        traces,
        updated_weights=updated_weights(subject),
        switches=switches_on(),
        optimizers=optimizer_shapes(),
        default_optimizer=getattr(subject.step.workload, "default_optimizer", False),
        graph_pools=graph_pools() if subject.on_cuda else (),
        never_compiled=() if graph_count() else given_to_compile(),
    )
    if plan.detail:
        try:
            replays = run.ran is not None and bool(run.ran.graph_launches)
            detail, memory = _record_with_memory(subject, replays, plan, folder, progress, notes)
            profile = replace(profile, detail=detail, memory=memory)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            notes.append("no detail: the step with stacks, shapes and memory ran out of memory")
    if plan.detail and plan.stacks:
        if _runs_op_by_op(run):
            profile = _with_dataflow(subject, profile, progress, notes)
        profile = replace(profile, setup_lines=setup_lines(profile.switches))
    return replace(run, profile=profile, notes=tuple(notes))


def _runs_op_by_op(run: Run) -> bool:
    """Whether the ops of a step can be watched one by one: alone, and not replayed.

    A group of one, as torchrun makes it on one device, is alone.
    """
    replays = run.ran is not None and bool(run.ran.graph_launches)
    shared = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    return not (replays or shared)


def _with_dataflow(
    subject: Subject, profile: Profile, progress: Progress, notes: list[str]
) -> Profile:
    progress("following values")
    try:
        dataflow, switches = record_dataflow(subject)
    except Exception as error:
        # A step may refuse to be watched op by op; its times are recorded all the same.
        notes.append(f"values were not followed through the step: {error_sentence(error)}")
        return profile
    together = tuple(sorted({*profile.switches, *switches}))
    return replace(profile, dataflow=dataflow, switches=together)


def _record_with_memory(
    subject: Subject,
    replays: bool,
    plan: ProfilePlan,
    folder: Path,
    progress: Progress,
    notes: list[str],
) -> tuple[str, MemoryTimeline | None]:
    """Return the file of the detailed step and its memory; add to `notes` what limits them.

    `replays`: the measured step launched CUDA graphs.
    """
    with contextlib.ExitStack() as stack:
        if replays:
            stack.enter_context(cuda_graphs_off())
            stack.enter_context(subject.op_by_op())
            notes.append("detail and memory were recorded with CUDA graphs off")
            _reach_steady_state(subject, progress)
        detail = record_detail(subject, folder, progress, plan.stacks)
        if not can_name_modules(subject.step.model):
            notes.append("no module ranges: it is not known what is compiled; see the stacks")
        return detail, _memory(subject, progress, notes) if plan.stacks else None


def _memory(subject: Subject, progress: Progress, notes: list[str]) -> MemoryTimeline | None:
    progress("recording memory")
    try:
        return record_memory(subject)
    except SteplabError as error:
        notes.append(f"no memory timeline: {error}")
    except UnicodeDecodeError:
        # A step that compiles while stacks are recorded frees code objects: names become garbage.
        notes.append("no memory timeline: torch's profiler could not name freed code")
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        notes.append("no memory timeline: recording it ran out of memory")
    return None


def _reach_steady_state(subject: Subject, progress: Progress) -> None:
    """Settle and warm up again: the probe that ran last may have reset compiled code."""
    settle(subject, subject.step.parts.settle_steps, progress)
    warm_up(subject, STEADY_STEPS, progress)


def updated_weights(subject: Subject) -> int | None:
    """Return the number of weights that a step updates; None without a known optimizer."""
    optimizer = subject.step.optimizer
    if optimizer is None or subject.spec.mode != "full":
        return None
    params = (p for group in optimizer.param_groups for p in group["params"])
    return sum(p.numel() for p in params if p.requires_grad)


def record_lean(
    subject: Subject, plan: ProfilePlan, folder: Path, progress: Progress
) -> tuple[str, ...]:
    """Run `plan.steps` steps and write one trace per cycle; return the files' names.

    Only phases are recorded, so that times stay close to those without a profiler. The table of
    averages covers the active steps of all cycles.
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
            activities=profiler_activities(subject.on_cuda),
            schedule=_schedule(plan),
            on_trace_ready=save,
            acc_events=True,
        ) as profiler,
    ):
        for _ in range(plan.steps):
            run_named(subject, then=pace.step_issued)
            profiler.step()
    write_averages(profiler, folder / AVERAGES_FILE, subject.on_cuda)
    return tuple(names)


def record_detail(subject: Subject, folder: Path, progress: Progress, stacks: bool = True) -> str:
    """Record one step with shapes, modules and, if `stacks`, Python lines and memory events.

    Returns the name of the file.
    """
    progress("tracing in detail")
    model = subject.step.model
    with (
        phase_ranges(subject),
        module_ranges(model) if can_name_modules(model) else contextlib.nullcontext(),
        RawProfile(
            subject.on_cuda,
            schedule=schedule(wait=0, warmup=DETAIL_WARMUP, active=1, repeat=1),
            on_trace_ready=lambda profiler: write_trace(profiler, folder / DETAIL_FILE),
            with_stack=stacks,
            record_shapes=True,
            profile_memory=stacks,
        ) as profiler,
    ):
        for _ in range(DETAIL_WARMUP + 1):
            with line_ranges() if stacks else contextlib.nullcontext():
                # No kernel of one step may run in the range of the next.
                run_named(subject, then=lambda: synchronize(subject))
            profiler.step()
    return DETAIL_FILE


class Pace:
    """Keeps the host one step ahead of the device, and no further.

    A host that may run ahead issues several steps while the device works on the first one, and
    its step ranges then say nothing about how long a step takes. The host waits for the previous
    step; meanwhile the device has the current step's work to do.
    """

    def __init__(self, on_cuda: bool) -> None:
        self.on_cuda = on_cuda
        self.previous: Any = None

    def step_issued(self) -> None:
        """Wait until the device has finished the step before the one just issued."""
        if not self.on_cuda:
            return
        done = torch.cuda.Event()
        done.record()
        if self.previous is not None:
            with record_function(PACING_RANGE):
                self.previous.synchronize()
        self.previous = done


def _schedule(plan: ProfilePlan) -> Callable[[int], Any]:
    with warnings.catch_warnings():
        # A schedule without warm-up is noted in the Run instead.
        warnings.filterwarnings("ignore", "Profiler won't be using warmup")
        made: Callable[[int], Any] = schedule(
            wait=plan.wait, warmup=plan.warmup, active=plan.active, repeat=plan.repeat
        )
    return made


@contextlib.contextmanager
def cuda_graphs_off() -> Iterator[None]:
    """Compile what runs inside without Inductor's CUDA graphs, whatever mode was asked for.

    A replayed graph is one launch: the line, operator and module of a kernel in it are unknown.
    Modes such as reduce-overhead override Inductor's global setting, hence the wrapper around the
    compiler call. Compiled code is dropped at both ends; Inductor's cache makes compiling it again
    quick.
    """
    compiler: Any = torch._TorchCompileInductorWrapper
    original = compiler.__call__

    def without_graphs(self: Any, *args: Any, **kwargs: Any) -> Any:
        kept, self.config = self.config, {**self.config, "triton.cudagraphs": False}
        try:
            return original(self, *args, **kwargs)
        finally:
            self.config = kept

    torch._dynamo.reset()
    compiler.__call__ = without_graphs
    try:
        with torch._inductor.config.patch({"triton.cudagraphs": False}):
            yield
    finally:
        compiler.__call__ = original
        torch._dynamo.reset()
