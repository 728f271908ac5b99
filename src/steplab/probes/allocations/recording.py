"""Recording: what an allocator did while one step ran, before anybody asks for whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from steplab.probes.allocations.segments import SegmentChange


@dataclass(frozen=True)
class Change:
    """One allocation (bytes above 0) or one free (bytes below 0)."""

    time_ns: int  # since the Unix epoch, as time.time_ns() tells it
    address: int
    bytes: int
    line: str = ""
    op: str = ""


@dataclass
class Recording:
    """Filled when its context manager ends; `changes` are in the order in which they happened."""

    source: str
    changes: list[Change] = field(default_factory=list)
    held: Mapping[int, int] | None = None  # address to bytes before the step; None: not told
    segments: list[SegmentChange] | None = None  # None: no allocator that reserves
    notes: tuple[str, ...] = ()
