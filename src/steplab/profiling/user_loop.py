"""`steplab.profile(step_fn)`: a Run of somebody's own training loop."""

from __future__ import annotations

import atexit
import functools
import inspect
import itertools
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from torch import nn

from steplab.core import Run, RunSpec, units
from steplab.core.errors import UserError
from steplab.core.printable import printable, raw_stream
from steplab.core.run import OWN_LOOP, new_run
from steplab.probes.clock import ClockProbe
from steplab.probes.compilation import CompilationProbe
from steplab.probes.compiled_calls import running_line
from steplab.probes.counters import CountersProbe, clock_notes
from steplab.probes.environment import capture_environment
from steplab.probes.loaders import LoaderWaits
from steplab.probes.memory import MemoryProbe
from steplab.probes.probe import Subject
from steplab.probes.ran import RanProbe, quiet_profiler
from steplab.profiling.output import (
    read_traces,
    save_files,
    scratch_folder,
    summary_cells,
    summary_file,
)
from steplab.profiling.plan import ProfilePlan
from steplab.profiling.recorder import record_profile
from steplab.step.loop import Progress, measure
from steplab.step.step import Watch, unwatched
from steplab.store import DEFAULT_ROOT, Store
from steplab.techniques.technique import StepParts
from steplab.workloads.misuse import accepts, describe
from steplab.workloads.workload import StepOutput

TIMED_STEPS = 20
TIMED_SECONDS = 5.0  # fewer steps are timed where those would take longer


def profile(
    step_fn: Callable[[], object],
    steps: int = 3,
    warmup: int = 2,
    *,
    name: str = "",
    detail: bool = True,
    store: Store | Path | str | None = DEFAULT_ROOT,
) -> Run:
    """Time and record `step_fn`, which runs one step of your own loop; return the Run.

    It is called about 30 times: `warmup` times untimed, up to 20 times against the clock (5 s at
    most, but at least `steps`), then under the profiler, `steps` times for the times of kernels
    (after one that is discarded) and, unless `detail` is False, up to 6 times for stacks, lines,
    shapes, memory and values. The Run's notes say how often it was. Whatever it raises is raised
    here; batches that end, as a UserError. Ranges that you open with
    `torch.profiler.record_function`, such as "forward", become the phases.

    The Run and its traces are saved in the folder `store` under `name` (by default the function's
    name); with None they are kept until the process ends. Either way
    `print(steplab.explain(run))` says what slows the step down.
    """
    _check_step_function(step_fn)
    if not (isinstance(steps, int) and isinstance(warmup, int)) or steps < 1 or warmup < 0:
        raise UserError(
            f"At least 1 step and 0 warm-up steps are needed, not {steps!r} and {warmup!r}."
        )
    quiet_profiler()
    kept = store if isinstance(store, Store) else Store(_scratch() if store is None else store)
    kept.check_writable()
    summary_file(kept.root, "--store").check()
    title = name or readable_name(step_fn)
    console = Console(file=raw_stream(sys.stderr), highlight=False)
    with console.status("") as status:

        def progress(text: str) -> None:
            status.update(printable(f"{title}: {text}"))

        compilation = CompilationProbe()
        compilation.begin()
        subject = _warmed_up(step_fn, title, steps, warmup, progress)
        run = _measure(subject, compilation, progress)
        run = _record_into_store(
            subject, run, ProfilePlan((0, 1, steps, 1), detail), kept, progress
        )
    assert run.clock is not None
    step = units.milliseconds(run.clock.step.median)
    print(f"{title}: ok, {step}; {run.notes[-1]}", file=sys.stderr)
    return run


def readable_name(step_fn: Any) -> str:
    """Return the name of a function; of a local one or a lambda, with that of its file."""
    while isinstance(step_fn, functools.partial):
        step_fn = step_fn.func
    full = getattr(step_fn, "__qualname__", type(step_fn).__name__)
    if "<" not in full:
        return str(full)
    code = getattr(inspect.unwrap(step_fn), "__code__", None)
    file = Path(code.co_filename).stem if code else ""
    return f"{file}.{full.rpartition('.')[2].strip('<>')}".strip(".")


def _warmed_up(
    step_fn: Callable[[], object], title: str, steps: int, warmup: int, progress: Progress
) -> Subject:
    """Run the untimed steps, and decide by the last of them how many are timed."""
    timed = steps
    for number in range(warmup):
        progress(f"warm-up {number + 1}/{warmup}")
        began = perf_counter()
        run_step(step_fn, done=number)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        within = int(TIMED_SECONDS / max(perf_counter() - began, 1e-9))
        timed = max(steps, min(TIMED_STEPS, within))
    # A step that uses the GPU has initialized it by now.
    device = "cuda" if torch.cuda.is_initialized() else "cpu"
    spec = RunSpec(title, batch=1, device=device, warmup=warmup, steps=timed)
    step = UserStep(step_fn, device, calls=warmup)
    return Subject(step, itertools.repeat(None), spec, capture_environment())


@functools.cache
def _scratch() -> Path:
    """Return a folder that is removed when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="steplab-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def _check_step_function(step_fn: Any) -> None:
    """Refuse what cannot be called without arguments, and what would run nothing when called."""
    if not callable(step_fn):
        found = "None, which a call has returned" if step_fn is None else describe(step_fn)
        raise UserError(
            f"step_fn is {found}, not a function that runs one step.",
            "Give the function itself: steplab.profile(train_step), without ().",
        )
    if inspect.isgeneratorfunction(step_fn) or inspect.iscoroutinefunction(step_fn):
        raise UserError(
            f"step_fn is {describe(step_fn)}, a generator or coroutine: calling it runs nothing.",
            "Write a plain function that runs one step and returns.",
        )
    if isinstance(step_fn, nn.Module) or not accepts(step_fn, 0):
        raise UserError(
            f"step_fn is {describe(step_fn)}, but it is called without arguments.",
            "Bind them: steplab.profile(lambda: train_step(batch)).",
        )


class UserStep:
    """A user's callable in place of a Step: its phases and its model are unknown."""

    optimizer: torch.optim.Optimizer | None = None
    workload: Any = None
    graph: Any = None

    def __init__(self, step_fn: Callable[[], object], device: str, calls: int) -> None:
        self.step_fn = step_fn
        self.calls = calls
        self.watch: Watch = unwatched
        self.model = nn.Module()
        scaler = torch.amp.GradScaler(device, enabled=False)
        self.parts = StepParts(self.model, torch.device(device), scaler)
        self.output = StepOutput(torch.zeros(()))

    def __call__(self, micro_batches: Any) -> StepOutput:
        """Run the user's step."""
        run_step(self.step_fn, done=self.calls)
        self.calls += 1
        return self.output


def run_step(step_fn: Callable[[], object], done: int) -> None:
    """Run the user's step after as many as are `done`; a loader that ends is told."""
    try:
        step_fn()
    except StopIteration as error:
        raise UserError(
            f"The loop's batches ended after {done} of about 30 steps.",
            "Let them begin again: batches = (batch for epoch in itertools.count() "
            "for batch in loader).",
        ) from error


def _measure(subject: Subject, compilation: CompilationProbe, progress: Progress) -> Run:
    """Time the steps without a profiler, then inspect further ones."""
    spec = subject.spec
    clock, memory, ran = ClockProbe(LoaderWaits(), running_line), MemoryProbe(), RanProbe()
    counters = CountersProbe()
    counters.begin(subject)
    measure(subject, spec.steps, clock, [memory, compilation, counters], progress)
    compiled, read = compilation.result(), counters.result()
    notes = [OWN_LOOP]
    notes += clock_notes(read, subject.on_cuda)
    if compiled is not None and compiled.graphs_in_window:
        notes.append("still compiling while the clock ran: give more warm-up steps")
    progress("inspecting")
    memory.inspect(subject)
    ran.inspect(subject)
    return replace(
        new_run(spec, subject.environment),
        clock=clock.result(),
        memory=memory.result(),
        ran=ran.result(),
        counters=read,
        compilation=compiled,
        notes=tuple(notes),
    )


def _record_into_store(
    subject: Subject, run: Run, plan: ProfilePlan, store: Store, progress: Progress
) -> Run:
    """Record, and return the Run as the store holds it."""
    with scratch_folder(store) as folder:
        run = record_profile(subject, run, plan, folder, progress)
        assert isinstance(subject.step, UserStep)
        run = replace(run, notes=(*run.notes, f"the step ran {subject.step.calls} times"))
        progress("reading the traces")
        run = read_traces(run, folder)[0]
        saved = save_files(store, run, folder)
    assert run.profile is not None
    cells = summary_cells(run, saved / run.profile.traces[0])
    summary_file(store.root, "--store").append(cells)
    return store.load(run.id)
