"""Memory: how many bytes a step needs, and in which phase."""

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
