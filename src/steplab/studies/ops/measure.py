"""Forward, backward and both of an op, each measured by itself and never by subtraction.

On CUDA every sample is the time between two events. Before the first event the device writes zeros
over a buffer twice as large as its L2 cache, so that inputs come from memory as they do in a
training step, and for so long that the host has issued the whole op when the first event is
reached: a short op is then not timed together with the gaps between its launches. On a CPU a
sample is wall time with warm caches.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch

from steplab.record import Clock, Samples
from steplab.studies.ops.subject import Subject

PHASES = ("forward", "backward", "both")
LEAST_REPEATS = 6  # an interval of the median at 95 % needs as many
MOST_COVER_MS = 5.0  # an op whose host needs longer waits inside, and covering cannot help it


@dataclass(frozen=True)
class Effort:
    """How much is measured: at most `repeats`, and no more once `seconds` are over."""

    repeats: int
    warmup: int
    seconds: float


class HostTimer:
    """Wall time."""

    source = "perf_counter"

    def __init__(self) -> None:
        self.host_ms: dict[str, list[float]] = {phase: [] for phase in PHASES}

    def timed(self, phase: str, work: Callable[[], Any]) -> Any:
        """Do the work and note how long it took."""
        start = perf_counter()
        done = work()
        self.host_ms[phase].append((perf_counter() - start) * 1e3)
        return done

    def finish(self) -> None:
        """Wait until all is done."""

    def device_ms(self, phase: str) -> list[float]:
        """Milliseconds of each sample of a phase."""
        return self.host_ms[phase]


class DeviceTimer(HostTimer):
    """Time between CUDA events; the host's time to issue the work is kept beside it."""

    source = "cuda events"

    def __init__(self, cover_ms: float) -> None:
        super().__init__()
        self.events: dict[str, list[tuple[Any, Any]]] = {phase: [] for phase in PHASES}
        size = 2 * torch.cuda.get_device_properties(0).L2_cache_size
        self.buffer = torch.empty(max(size, 2**26), dtype=torch.int8, device="cuda")
        self.writes = 1 + math.ceil(cover_ms / self._write_ms())

    def timed(self, phase: str, work: Callable[[], Any]) -> Any:
        """Empty the cache, then do the work between two events."""
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(self.writes):
            self.buffer.zero_()
        pair[0].record()
        done = super().timed(phase, work)
        pair[1].record()
        self.events[phase].append(pair)
        return done

    def finish(self) -> None:
        """Wait until all is done."""
        torch.cuda.synchronize()

    def device_ms(self, phase: str) -> list[float]:
        """Milliseconds of each sample of a phase."""
        return [start.elapsed_time(end) for start, end in self.events[phase]]

    def _write_ms(self) -> float:
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.buffer.zero_()
        pair[0].record()
        for _ in range(10):
            self.buffer.zero_()
        pair[1].record()
        torch.cuda.synchronize()
        return max(pair[0].elapsed_time(pair[1]) / 10, 1e-3)


def measure(subject: Subject, effort: Effort) -> Clock:
    """Return a Clock whose `step` is both, with the phases forward and backward beside it.

    The three take turns, so that drift touches all alike. `host` is the time that the host needed
    to issue both. The op must have run before: nothing here compiles.
    """
    return _clock(_repeat(subject, effort, lambda timer: _turn(subject, timer)))


def measure_forward(subject: Subject, effort: Effort) -> Clock:
    """Measure the forward alone, for an op whose backward fails; `step` then has no samples."""
    return _clock(_repeat(subject, effort, lambda timer: _forward_turn(subject, timer)))


def _repeat(subject: Subject, effort: Effort, turn: Callable[[HostTimer], None]) -> HostTimer:
    on_cuda = subject.dout.device.type == "cuda"
    warm = HostTimer()
    for _ in range(max(1, effort.warmup)):
        turn(warm)
        if on_cuda:
            torch.cuda.synchronize()
    longest = max(values[-1] for values in warm.host_ms.values() if values)
    timer = DeviceTimer(min(1.5 * longest, MOST_COVER_MS)) if on_cuda else HostTimer()
    gc.collect()
    gc.disable()
    end = perf_counter() + effort.seconds
    try:
        for count in range(effort.repeats):
            if count >= LEAST_REPEATS and perf_counter() > end:
                break
            turn(timer)
            timer.finish()
    finally:
        gc.enable()
    return timer


def _turn(subject: Subject, timer: HostTimer) -> None:
    # A fresh forward for every backward: compiled code frees what it saved.
    backward = partial(subject.backward, timer.timed("forward", subject.forward))
    timer.timed("backward", backward)
    del backward  # and the output with it
    timer.timed("both", lambda: subject.backward(subject.forward()))


def _forward_turn(subject: Subject, timer: HostTimer) -> None:
    timer.timed("forward", subject.forward)


def _clock(timer: HostTimer) -> Clock:
    device = {phase: _marked(timer.device_ms(phase)) for phase in PHASES}
    host = {phase: Samples(tuple(values), "ms") for phase, values in timer.host_ms.items()}
    return Clock(
        step=device["both"],
        host=host["both"],
        data_wait=Samples((), "ms"),
        phases={name: device[name] for name in ("forward", "backward")},
        host_phases={name: host[name] for name in ("forward", "backward")},
        window_ms=sum(device["both"].values),
        source=timer.source,
    )


def _marked(values: list[float]) -> Samples:
    samples = Samples(tuple(values), "ms")
    return replace(samples, marks={str(i): "slow, no cause seen" for i in samples.slow_indices()})
