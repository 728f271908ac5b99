"""Bytes of a step: Memory has the peaks, MemoryTimeline who held how much and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Memory:
    """Bytes. On CUDA from the caching allocator, on CPU the resident set of the process."""

    before: int  # held before the step: weights, optimizer state, the batch
    peak: int  # largest value inside the measured window
    reserved: int | None  # largest value the allocator held from the driver
    total: int | None  # capacity of the device
    source: str  # "cuda allocator" or "process resident set"
    phase_peaks: Mapping[str, int] = field(default_factory=dict)  # from one extra step


KINDS = ("weights", "gradients", "optimizer state", "activations", "temporaries", "other")


@dataclass(frozen=True)
class Allocation:
    """One block of memory that was live at the peak, or one of the largest of the step."""

    bytes: int
    kind: str  # one of KINDS
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    line: str = ""  # file.py:12 (function), the innermost line outside torch
    module: str = ""
    op: str = ""  # the operator that asked for it


@dataclass(frozen=True)
class MemoryTimeline:
    """Bytes by kind over time; `times_ms[i]` belongs to `bytes_by_kind[kind][i]`."""

    times_ms: tuple[float, ...]  # since the step began; at most some thousand points
    bytes_by_kind: Mapping[str, tuple[int, ...]]
    phases_ms: Mapping[str, tuple[float, float]]  # begin and end of every phase
    peak_bytes: int
    peak_ms: float
    peak_by_kind: Mapping[str, int]
    at_peak: tuple[Allocation, ...]  # largest first, at most 20
    largest: tuple[Allocation, ...]  # largest of the step, largest first, at most 20
    saved_by_module: Mapping[str, int] = field(default_factory=dict)  # saved for backward
    reserved_bytes: int | None = None  # by the allocator at the peak; None on CPU
    largest_free_block: int | None = None  # of the reserved; small while much is free: fragmented
    source: str = ""  # "cuda allocator" or "profiler memory events"
    notes: tuple[str, ...] = ()
