"""Profile: what `steplab profile` adds to a Run, beside the traces that lie in its folder."""

from __future__ import annotations

from dataclasses import dataclass

from steplab.record.budget import Budget
from steplab.record.memory_timeline import MemoryTimeline


@dataclass(frozen=True)
class Profile:
    """A lean trace for the times, and one step in detail for who did it.

    Stacks, shapes and memory cost the host so much that times taken with them are not the
    step's own; so they are recorded in another step, and matched kernel by kernel.
    """

    schedule: tuple[int, int, int, int]  # wait, warm-up, active, repeat
    traces: tuple[str, ...]  # artifact names, one per repeat
    detail: str | None = None  # artifact name of the detailed step
    budget: Budget | None = None
    memory: MemoryTimeline | None = None
    updated_weights: int | None = None  # by each step; None: unknown, or none is updated
