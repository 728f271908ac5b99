"""Frozen weights are kept in fp32, and every step casts them to 16 bits.

What it sees: weights that take no gradient, with which a step does nothing but cast them, as the
Run recorded it, where 16 bits would save 10 % of the step's peak.
Why it costs: a weight that never changes needs no fp32: its products use the 16-bit copy, which
lives beside it until the backward where something before it is trained. 6 bytes instead of 2.
Remedy: convert the frozen weights once: `module.to(torch.bfloat16)`; the products are the same.
When it is wrong: they will be trained later. Where copies are gone as soon as they are used, as in
a teacher or below all that is trained, it is a note: it saves half of the weights, and the casts.
"""

from __future__ import annotations

from steplab.core import Finding, units
from steplab.findings.case import Case

SHARE = 0.10  # of the step's peak
NARROWER = 0.5  # bytes of 16 bits over those of fp32
SHOWN = 3


def check(case: Case) -> Finding | None:
    """Compare what 16 bits would save with the peak."""
    memory = case.run.memory if case.run is not None else None
    casts = case.dataflow.frozen_casts if case.dataflow is not None else None
    if memory is None or casts is None:
        return None
    saved = round((1 - NARROWER) * casts.bytes) + casts.copies
    if not saved > SHARE * memory.peak:
        return None
    return Finding(
        rule="frozen_in_fp32",
        claim=f"{casts.weights} frozen weights are kept in fp32, {units.bytes_(casts.bytes)}, and "
        "cast to 16 bits in every step",
        evidence=(
            f"{units.bytes_(casts.copies)} of copies are alive when the backward begins",
            *casts.names[:SHOWN],
            *(f"requires_grad is set at {line}" for line in case.setup_lines("requires_grad")),
            *(f"fp32 is asked for at {line}" for line in case.setup_lines("float32")),
        ),
        remedy="convert frozen weights once, before the training: module.to(torch.bfloat16); what "
        "is trained stays in fp32",
        stake_bytes=saved,
        of_bytes=memory.peak,
        why="a weight that never changes needs no more than the bits that its products read",
        # Many teachers run so, and a copy that is gone at once takes no room.
        ordinary=casts.copies < NARROWER * casts.bytes / 2,
    )


RULE = check
