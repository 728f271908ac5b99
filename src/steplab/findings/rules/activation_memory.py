"""Activations fill the device.

What it sees: a step whose peak is above 80 % of the device memory, most of it saved for backward.
Why it costs: there is no room for a larger batch, and the allocator starts to free and reallocate.
Remedy: checkpoint the blocks: keep their inputs and recompute the rest in backward.
When it is wrong: the batch is already large enough; checkpointing runs the forward twice.
"""

from __future__ import annotations

from collections import defaultdict

from steplab.core import Finding, units
from steplab.core.units import fold_layer_numbers
from steplab.findings.case import Case

NEARLY_FULL = 0.80  # of the device's memory
MOSTLY = 0.50  # of the peak


def check(case: Case) -> Finding | None:
    """Compare the peak with the device, and the activations with the peak."""
    timeline, capacity = case.timeline, case.capacity_bytes
    if timeline is None or not capacity or timeline.peak_bytes < NEARLY_FULL * capacity:
        return None
    saved = timeline.peak_by_kind.get("activations", 0)
    if saved < MOSTLY * timeline.peak_bytes:
        return None
    by_module: dict[str, int] = defaultdict(int)
    for name, held in timeline.saved_by_module.items():
        by_module[fold_layer_numbers(name)] += held
    largest = sorted(by_module.items(), key=lambda item: -item[1])[:3]
    evidence = [f"peak {units.bytes_(timeline.peak_bytes)} of {units.bytes_(capacity)}"]
    evidence += [f"{name or 'model'}: {units.bytes_(held)}" for name, held in largest]
    return Finding(
        rule="activation_memory",
        claim=f"activations hold {units.bytes_(saved)} of a device that is nearly full",
        evidence=tuple(evidence),
        remedy="checkpointing=blocks, or torch.utils.checkpoint around each block of your own "
        "(computes the forward of each once more)",
        stake_bytes=saved,
        why="every block keeps what its backward needs until backward reaches it",
    )


RULE = check
