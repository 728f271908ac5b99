"""Time and memory of an op's forward and backward. Imports torch.

Forward, backward and both are measured separately, never by subtraction. On CUDA a sample is the
time between two events. Before the first event the device writes zeros over a buffer twice as large
as its L2 cache, so that inputs come from memory as they do in a training step; the writes also last
until the host has issued the whole op, so that a short op is not timed together with the gaps
between its launches. On a CPU a sample is wall time with warm caches.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from steplab.bench.op_results import KEPT
from steplab.core import Clock, Memory, Samples
from steplab.core.errors import Unsupported
from steplab.probes.allocator import CPU_SOURCE, read_tree
from steplab.probes.clock import Contention
from steplab.probes.ran import RawProfile

PHASES = ("forward", "backward", "both")
MIN_REPEATS = 6  # the fewest samples that give the median an interval at 95 %
MAX_COVER_MS = 5.0  # an op that keeps the host busy longer waits inside: covering cannot help
TORCH_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class BoundOp:
    """An op with its inputs, to be called again and again: `forward()` computes from `leaves`."""

    forward: Callable[[], Tensor]
    leaves: Mapping[str, Tensor]  # by name; their gradients are wanted
    dout: Tensor  # the gradient that the output is given; its shape and dtype

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the leaves; the graph of `out` is used up."""
        return torch.autograd.grad(out, list(self.leaves.values()), self.dout)

    def results(self) -> dict[str, Tensor]:
        """Return the output as `out` and the gradient of each leaf as `d<name>`."""
        out = self.forward()
        names = [f"d{name}" for name in self.leaves]
        return {"out": out.detach(), **dict(zip(names, self.backward(out), strict=True))}


def use_dtype(name: str, device: torch.device) -> torch.dtype:
    """Set the precision of fp32 products as `name` says, and return torch's dtype for it."""
    if name == "tf32" and (device.type != "cuda" or torch.cuda.get_device_capability() < (8, 0)):
        raise Unsupported("tf32 needs an NVIDIA GPU of compute capability 8.0 or newer.")
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    return TORCH_DTYPES[name]


@dataclass(frozen=True)
class TimingOptions:
    """How much is measured: at most `repeats` samples, and no more after `seconds`."""

    repeats: int
    warmup: int
    seconds: float


class HostTimer:
    """Times phases of an op by the wall clock."""

    source = "perf_counter"

    contended: float | None = None  # see Clock.contended

    def __init__(self) -> None:
        self.host_ms: dict[str, list[float]] = {phase: [] for phase in PHASES}

    def timed(self, phase: str, work: Callable[[], Any]) -> Any:
        """Do the work and record how long it took."""
        start = perf_counter()
        result = work()
        self.host_ms[phase].append((perf_counter() - start) * 1e3)
        return result

    def finish(self) -> None:
        """Wait until all is done."""

    def device_ms(self, phase: str) -> list[float]:
        """Return the milliseconds of each sample of a phase."""
        return self.host_ms[phase]


class DeviceTimer(HostTimer):
    """Times phases between CUDA events; the host's time to issue the work is kept beside it."""

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
        result = super().timed(phase, work)
        pair[1].record()
        self.events[phase].append(pair)
        return result

    def finish(self) -> None:
        """Wait until all is done."""
        torch.cuda.synchronize()

    def device_ms(self, phase: str) -> list[float]:
        """Return the milliseconds of each sample of a phase."""
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


def time_op(call: BoundOp, options: TimingOptions) -> Clock:
    """Return a Clock whose `step` is forward and backward together, with both phases beside it.

    The three take turns, so that drift touches all alike. `host` is the time that the host needed
    to issue both. The op must have run before: nothing here compiles.
    """
    return _clock(_repeat(call, options, lambda timer: _time_phases(call, timer)))


def time_forward(call: BoundOp, options: TimingOptions) -> Clock:
    """Measure the forward alone, for an op whose backward fails; `step` then has no samples."""
    return _clock(_repeat(call, options, lambda timer: timer.timed("forward", call.forward)))


def _repeat(call: BoundOp, options: TimingOptions, sample: Callable[[HostTimer], Any]) -> HostTimer:
    """Warm up, then take samples; return the timer that holds them."""
    on_cuda = call.dout.device.type == "cuda"
    warm = HostTimer()
    for _ in range(max(1, options.warmup)):
        sample(warm)
        if on_cuda:
            torch.cuda.synchronize()
    longest = max(values[-1] for values in warm.host_ms.values() if values)
    timer = DeviceTimer(min(1.5 * longest, MAX_COVER_MS)) if on_cuda else HostTimer()
    gc.collect()
    gc.disable()
    contention = Contention()
    end = perf_counter() + options.seconds
    try:
        for count in range(options.repeats):
            if count >= MIN_REPEATS and perf_counter() > end:
                break
            sample(timer)
            timer.finish()
    finally:
        gc.enable()
    timer.contended = contention.share()
    return timer


def _time_phases(call: BoundOp, timer: HostTimer) -> None:
    # A fresh forward for every backward: compiled code frees what it saved.
    backward = partial(call.backward, timer.timed("forward", call.forward))
    timer.timed("backward", backward)
    del backward  # and the output with it
    timer.timed("both", lambda: call.backward(call.forward()))


def _clock(timer: HostTimer) -> Clock:
    device = {
        phase: Samples(tuple(timer.device_ms(phase)), "ms").with_slow_marked() for phase in PHASES
    }
    host = {phase: Samples(tuple(values), "ms") for phase, values in timer.host_ms.items()}
    return Clock(
        step=device["both"],
        host=host["both"],
        data_wait=Samples((), "ms"),
        phases={name: device[name] for name in ("forward", "backward")},
        host_phases={name: host[name] for name in ("forward", "backward")},
        window_ms=sum(device["both"].values),
        source=timer.source,
        contended=timer.contended,
    )


def measure_memory(call: BoundOp) -> Memory:
    """Run forward and backward once and return what was held at most, in each and in between.

    Output and gradients count; inputs do not, they are in `before`. On a CPU `before` is 0, and
    the rest comes from the allocations that the profiler recorded.
    """
    gc.collect()
    return _memory_on_cuda(call) if call.dout.device.type == "cuda" else _memory_on_cpu(call)


def _memory_on_cuda(call: BoundOp) -> Memory:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = call.forward()
    peaks = {"forward": torch.cuda.max_memory_allocated(), KEPT: torch.cuda.memory_allocated()}
    torch.cuda.reset_peak_memory_stats()
    gradients = call.backward(out)
    peaks["backward"] = torch.cuda.max_memory_allocated()
    reserved = torch.cuda.max_memory_reserved()
    del out, gradients
    total = torch.cuda.get_device_properties(0).total_memory
    return Memory(before, max(peaks.values()), reserved, total, "cuda allocator", peaks)


def _memory_on_cpu(call: BoundOp) -> Memory:
    # Without stacks: a Python loop inside the op (Triton's interpreter) would take minutes.
    with RawProfile(on_cuda=False, profile_memory=True) as profiler:
        out = call.forward()
        between_ns = time.time_ns()
        gradients = call.backward(out)
        end_ns = time.time_ns()
    del out, gradients
    changes = read_tree(profiler.profiler.kineto_results.experimental_event_tree())
    first = [change.bytes for change in changes if change.time_ns <= between_ns]
    second = [change.bytes for change in changes if between_ns < change.time_ns <= end_ns]
    kept = sum(first)
    peaks = {"forward": _peak(0, first), KEPT: kept, "backward": _peak(kept, second)}
    return Memory(0, max(peaks.values()), None, None, CPU_SOURCE, peaks)


def _peak(start: int, changes: Iterable[int]) -> int:
    return max(accumulate(changes, initial=start))
