"""Bytes held before, during and in each phase of a step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from steplab.core import Memory
from steplab.modules.optimizer import unpacked_state
from steplab.modules.shards import stored
from steplab.probes.allocator import CPU_SOURCE, SHARED_POOL
from steplab.probes.known_tensors import held_by_objects
from steplab.probes.probe import Probe, Subject
from steplab.probes.ran import RawProfile

ALLOCATED = "[memory]"  # the profiler's event of an allocation or a free


class MemoryProbe(Probe):
    """On CUDA the caching allocator's counters over the timed steps.

    A CPU has none, and its resident set keeps what was freed: there one more step runs under the
    profiler, which sees every allocation.
    """

    found: Memory | None = None

    def open_window(self, subject: Subject) -> None:
        """Reset the peak, which so far is that of compilation and warm-up."""
        if subject.on_cuda:
            self.before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()

    def close_window(self, subject: Subject) -> None:
        """Read the window's peak.

        A replayed graph allocates nothing: what its private pool holds is added.
        """
        if subject.on_cuda:
            reserved = torch.cuda.max_memory_reserved()
            held = unused_in_private_pools(torch.cuda.memory_snapshot())
            peak = min(torch.cuda.max_memory_allocated() + held, reserved)
            total = torch.cuda.get_device_properties(0).total_memory
            self.found = Memory(self.before, peak, reserved, total, "cuda allocator")

    def inspect(self, subject: Subject) -> None:
        """Run one more step and read the peak of each phase."""
        if self.found is None:
            self.found = cpu_memory(subject)
            return
        peaks: dict[str, int] = {}

        @contextlib.contextmanager
        def watch(phase: str) -> Iterator[None]:
            torch.cuda.reset_peak_memory_stats()
            yield
            peaks[phase] = max(peaks.get(phase, 0), torch.cuda.max_memory_allocated())

        before, subject.step.watch = subject.step.watch, watch
        subject.run_step()
        subject.step.watch = before
        self.found = replace(self.found, phase_peaks=peaks)

    def result(self) -> Memory | None:
        """Return the record."""
        return self.found


def unused_in_private_pools(segments: Sequence[Mapping[str, Any]]) -> int:
    """Return the bytes in the private pools of CUDA graphs that the allocator counts as free.

    Nobody else can use them: the next replay writes there.
    """
    private = [s for s in segments if tuple(s.get("segment_pool_id", SHARED_POOL)) != SHARED_POOL]
    return sum(int(s["total_size"]) - int(s["allocated_size"]) for s in private)


def cpu_memory(subject: Subject) -> Memory:
    """Run two more steps; add the allocations of the second to what it finds when it begins.

    The profiler does not see how a block is freed that is older than itself, as the gradients of
    the step before are. Without stacks, which slow a step of many small operators tenfold.
    """
    ends: list[tuple[int, str]] = []

    @contextlib.contextmanager
    def watch(phase: str) -> Iterator[None]:
        yield
        ends.append((time.time_ns(), phase))

    with RawProfile(on_cuda=False, profile_memory=True) as profiler:
        subject.run_step()
        before, begin_ns = held_bytes(subject), time.time_ns()
        watched_before, subject.step.watch = subject.step.watch, watch
        subject.run_step()
        end_ns = time.time_ns()
        subject.step.watch = watched_before
    events = profiler.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == ALLOCATED]
    own = sorted(change for change in changes if begin_ns < change[0] <= end_ns)
    peaks, whole = peaks_by_phase(before, own, ends)
    return Memory(before, whole, None, None, CPU_SOURCE, peaks)


def held_bytes(subject: Subject) -> int:
    """Return the bytes of all weights, buffers, gradients and states of the optimizer.

    A step of the user's own does not tell its model: then those of every one in the process.
    """
    model, optimizer = subject.step.model, subject.step.optimizer
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    if optimizer is not None:
        leaves = (leaf for _, state in unpacked_state(optimizer) for leaf in tree_leaves(state))
        tensors += [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    tensors = tensors or list(held_by_objects())
    parts = (stored(t) for t in tensors)  # of a tensor that ranks share, this rank's
    storages = (t.untyped_storage() for t in parts if t.layout == torch.strided)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def peaks_by_phase(
    before: int, changes: Iterable[tuple[int, int]], ends: Iterable[tuple[int, str]]
) -> tuple[dict[str, int], int]:
    """Return the most bytes that were held up to the end of each phase, and in the whole step.

    `changes` are moments and bytes, below 0 where they are freed; `ends` moments and phases; both
    in order.
    """
    peaks: dict[str, int] = {}
    waiting = list(ends)
    now = most = before
    for moment, size in changes:
        while waiting and moment > waiting[0][0]:
            phase = waiting.pop(0)[1]
            peaks[phase] = max(peaks.get(phase, 0), most)
            most = now
        now += size
        most = max(most, now)
    for _, phase in waiting:
        peaks[phase] = max(peaks.get(phase, 0), most)
        most = now
    return peaks, max([most, *peaks.values()])


def graph_pools() -> tuple[int, ...]:
    """Return the bytes of each pool of memory that only CUDA graphs use."""
    pools: dict[Any, int] = {}
    for segment in torch.cuda.memory_snapshot():
        pool = tuple(segment.get("segment_pool_id") or (0, 0))
        if pool != (0, 0):
            pools[pool] = pools.get(pool, 0) + segment["total_size"]
    return tuple(sorted(pools.values(), reverse=True))


PROBE = MemoryProbe
