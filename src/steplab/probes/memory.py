"""Bytes held before, during and in each phase of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from steplab.core import Memory
from steplab.probes.allocator import SHARED_POOL
from steplab.probes.probe import Probe, Subject

STATUS = Path("/proc/self/status")
CLEAR_PEAK = Path("/proc/self/clear_refs")


class MemoryProbe(Probe):
    """On CUDA the caching allocator's counters, on Linux CPUs the process's resident set."""

    peak: int | None = None

    def open_window(self, subject: Subject) -> None:
        """Reset the peak, which so far is that of compilation and warm-up."""
        self.on_cuda = subject.on_cuda
        self.before = self._now()
        self._reset_peak()

    def close_window(self, subject: Subject) -> None:
        """Read the window's peak.

        A replayed graph allocates nothing: what its private pool holds is added.
        """
        self.peak = self._peak()
        self.reserved = torch.cuda.max_memory_reserved() if self.on_cuda else None
        if self.reserved is not None and self.peak is not None:
            held = unused_in_private_pools(torch.cuda.memory_snapshot())
            self.peak = min(self.peak + held, self.reserved)

    def inspect(self, subject: Subject) -> None:
        """Run one more step and read the peak of each phase (CUDA only).

        On a CPU the resident set does not shrink while the allocator keeps pages, so phases cannot
        be told apart.
        """
        self.phase_peaks: dict[str, int] = {}
        if not self.on_cuda:
            return

        @contextlib.contextmanager
        def watch(phase: str) -> Iterator[None]:
            self._reset_peak()
            yield
            self.phase_peaks[phase] = max(self.phase_peaks.get(phase, 0), self._peak() or 0)

        before, subject.step.watch = subject.step.watch, watch
        subject.run_step()
        subject.step.watch = before

    def result(self) -> Memory | None:
        """Return the record; None where the system does not say."""
        if self.before is None or self.peak is None:
            return None
        total = torch.cuda.get_device_properties(0).total_memory if self.on_cuda else None
        source = "cuda allocator" if self.on_cuda else "process resident set"
        return Memory(self.before, self.peak, self.reserved, total, source, self.phase_peaks)

    def _now(self) -> int | None:
        return torch.cuda.memory_allocated() if self.on_cuda else status_bytes("VmRSS")

    def _peak(self) -> int | None:
        return torch.cuda.max_memory_allocated() if self.on_cuda else status_bytes("VmHWM")

    def _reset_peak(self) -> None:
        if self.on_cuda:
            torch.cuda.reset_peak_memory_stats()
            return
        # Writing 5 sets the high-water mark back to the present size (Linux 4.0 and newer).
        with contextlib.suppress(OSError):
            CLEAR_PEAK.write_text("5")


def unused_in_private_pools(segments: Sequence[Mapping[str, Any]]) -> int:
    """Return the bytes in the private pools of CUDA graphs that the allocator counts as free.

    Nobody else can use them: the next replay writes there.
    """
    private = [s for s in segments if tuple(s.get("segment_pool_id", SHARED_POOL)) != SHARED_POOL]
    return sum(int(s["total_size"]) - int(s["allocated_size"]) for s in private)


def status_bytes(key: str) -> int | None:
    """Return a size from this process's status: VmRSS now, VmHWM at most; None outside Linux."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    line = next((text for text in lines if text.startswith(f"{key}:")), None)
    return int(line.split()[1]) * 1024 if line else None


PROBE = MemoryProbe
