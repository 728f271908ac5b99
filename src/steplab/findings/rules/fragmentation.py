"""The allocator holds free memory that it cannot use.

What it sees: at the peak, more than 15 % of the reserved memory is free, and the largest free block
is less than half of that. The step itself takes memory. Reserved is what the timed steps had: the
step that is watched for its values keeps far more, and leaves pieces that no other step sees.
Why it costs: an allocation fails although the free blocks together would suffice.
Remedy: `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, or sizes that do not vary.
When it is wrong: the memory is left from an earlier, larger phase, and later requests will use it.
"""

from __future__ import annotations

from steplab.core import Finding, MemoryTimeline, units
from steplab.findings.case import Case

SHARE = 0.15
SEGMENT = 20 * 2**20  # that torch reserves for tensors of 1 to 10 MiB: less leaves no other pieces


def check(case: Case) -> Finding | None:
    """Compare reserved with allocated bytes at the peak."""
    timeline = case.timeline
    if timeline is None or timeline.reserved_bytes is None or timeline.largest_free_block is None:
        return None
    reserved = min(timeline.reserved_bytes, _timed(case) or timeline.reserved_bytes)
    free = reserved - timeline.peak_bytes
    if free < SHARE * reserved or timeline.largest_free_block > free / 2:
        return None
    # A step that replays a graph takes hardly any: the pieces are left from a warm-up before it.
    if _taken(timeline) < SEGMENT:
        return None
    largest = units.bytes_(timeline.largest_free_block)
    return Finding(
        rule="fragmentation",
        claim=f"{units.bytes_(free)} are reserved but free in small pieces",
        evidence=(f"the largest free block is {largest}",),
        remedy="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or pad to few sizes",
        stake_bytes=free,
        why="an allocation fails although the free blocks together would hold it",
    )


def _timed(case: Case) -> int | None:
    """Return what the allocator held in the timed steps, before any was watched; None: unknown."""
    memory = case.run.memory if case.run is not None else None
    return memory.reserved if memory is not None else None


def _taken(timeline: MemoryTimeline) -> int:
    """Return the bytes at the peak that the step did not find there."""
    return timeline.peak_bytes - sum(held[0] for held in timeline.bytes_by_kind.values())


RULE = check
