"""Activations fill the device.

What it sees: a step whose peak is above 80 % of the device, most of it saved for backward.
Why it costs: no room for a larger batch, and the allocator begins to free and ask again.
Remedy: checkpoint the blocks: keep their inputs, compute the rest again in backward.
When it is wrong: a batch that is large enough; checkpointing computes the forward again.
"""

from __future__ import annotations

from collections import defaultdict

from steplab.core import Finding, units
from steplab.core.units import fold_layer_numbers
from steplab.findings.case import Case

SCARCE = 0.80  # of the device's memory
MOST = 0.50  # of the peak


def check(case: Case) -> Finding | None:
    """Compare the peak with the device, and the activations with the peak."""
    timeline, capacity = case.timeline, case.capacity_bytes
    if timeline is None or not capacity or timeline.peak_bytes < SCARCE * capacity:
        return None
    saved = timeline.peak_by_kind.get("activations", 0)
    if saved < MOST * timeline.peak_bytes:
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
