"""The loop of a measurement: settle, warm up, measure."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from steplab.core import Samples
from steplab.core.errors import MeasurementError
from steplab.probes.clock import ClockProbe
from steplab.probes.compilation import compiled_again, graph_count
from steplab.probes.disturbances import mark_disturbed
from steplab.probes.probe import Probe, Subject, WatchedStep, without_gradients

# A step that still compiles after this many steps always will: a shape or a number in it changes.
MAX_SETTLE_STEPS = 12

Progress = Callable[[str], None]


def settle(subject: Subject, at_least: int, progress: Progress) -> float | None:
    """Run until a step compiles nothing; return the seconds of the first step.

    An eager step needs no settling: `at_least` is 0 and nothing runs, so that a warm-up study
    sees the first step of the process.
    """
    if not at_least:
        return None
    progress("compiling")
    forward_eagerly(subject.step, subject.spec.mode, next(subject.feed)[0])
    first_seconds = None
    for count in range(MAX_SETTLE_STEPS):
        graphs, start = graph_count(), perf_counter()
        subject.run_step()
        synchronize(subject)
        if first_seconds is None:
            first_seconds = perf_counter() - start
        if graph_count() == graphs and count + 1 >= at_least:
            return first_seconds
    why = compiled_again() or "shapes must change"
    raise MeasurementError(f"Still compiling after {MAX_SETTLE_STEPS} steps: {why}.")


def settle_scaler(subject: Subject) -> None:
    """Run until the gradient scaler skips no update: skipped ones would be timed as steps.

    It starts at 65,536 and halves at every overflow, so 16 skips bring it down to 1.
    """
    scaler = subject.step.parts.scaler
    while scaler.is_enabled() and subject.spec.mode == "full":
        before = scaler.get_scale()
        subject.run_step()
        if scaler.get_scale() >= before:
            return
        if before < 1:
            raise MeasurementError("fp16 gradients overflow at any scale: every update is skipped.")


def forward_eagerly(step: WatchedStep, mode: str, batch: Any) -> None:
    """Run one forward pass without compiling, so that a model's errors are its own.

    Raised under tracing, the same exception would reach the user as dynamo's. Without gradients,
    where the loss needs none, it takes less memory than the step: it cannot run out where that
    would not.
    """
    run = step.workload.predict if mode == "infer" else step.workload.loss
    eager = torch.compiler.set_stance("force_eager")
    with eager, step.parts.forward_context():
        without_gradients(lambda: run(step.model, batch))


def warm_up(subject: Subject, steps: int, progress: Progress) -> None:
    """Run untimed steps."""
    for index in range(steps):
        progress(f"warm-up {index + 1}/{steps}")
        subject.run_step()
    synchronize(subject)


def measure(
    subject: Subject, steps: int, clock: ClockProbe, probes: list[Probe], progress: Progress
) -> list[Tensor]:
    """Run the timed steps, with no synchronization between them; return their losses."""
    progress(f"measuring {steps} steps")
    losses = []
    for probe in probes:
        probe.open_window(subject)
    clock.open_window(subject)
    try:
        for _ in range(steps):
            with clock.fetching():
                batch = next(subject.feed)
            with clock.stepping():
                losses.append(subject.step(batch).loss)
        synchronize(subject)
    finally:  # in a loop of the user's own, which goes on, nothing stays watched
        clock.close_window(subject)
        for probe in probes:
            probe.close_window(subject)
    return losses


def time_steps(subject: Subject, steps: int) -> Samples:
    """Time further steps of one that is kept alive; milliseconds each, and what disturbed them.

    One untimed step goes first: another worker has had the device in between, and this one's
    first step finds its clocks and caches as that left them.
    """
    warm_up(subject, 1, lambda text: None)
    clock = ClockProbe()
    measure(subject, steps, clock, [], lambda text: None)
    seen = clock.result()
    marks = mark_disturbed(seen.step, seen.data_wait, clock.disturbed)
    return Samples(seen.step.values, "ms", marks)


def synchronize(subject: Subject) -> None:
    """Wait until the device has nothing left to do."""
    if subject.on_cuda:
        torch.cuda.synchronize()
