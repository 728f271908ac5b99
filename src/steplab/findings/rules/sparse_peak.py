"""Utilization is computed against a peak that only sparse matrices reach.

What it sees: a peak given by the user that is the 2:4-sparse peak of a card.
Why it costs: MFU looks half as good as it is, and nobody knows when to stop.
Remedy: leave the peak out, or give the dense one.
When it is wrong: the model really multiplies 2:4-sparse matrices.
"""

from __future__ import annotations

from steplab.core import Finding, Ran
from steplab.findings.case import Case
from steplab.hardware.catalog import sparse_peak_owner
from steplab.hardware.kernel_names import main_matmul_dtype


def check(case: Case) -> Finding | None:
    """Look the given peak up among twice the dense ones."""
    asked = case.run.spec.peak_tflops if case.run else None
    if asked is None or case.run is None:
        return None
    owner = sparse_peak_owner(asked, _dtype(case.run.ran), case.card)
    if owner is None:
        return None
    dense = owner.peak(_dtype(case.run.ran))
    return Finding(
        rule="sparse_peak",
        claim=f"{asked:g} TFLOP/s is the sparse peak of the {owner.name}; dense is {dense:g}",
        evidence=(f"peak_tflops={asked:g} was given", owner.source),
        remedy=f"leave the peak out, or give {dense:g}",
        stake_ms=0.0,
        why="MFU looks half as good as it is; it costs the step nothing",
    )


def _dtype(ran: Ran | None) -> str:
    """Return the 16-bit dtype of most products; bf16 for fp32, which has no sparse peak."""
    most = main_matmul_dtype(ran, "bf16")
    return most if most in ("bf16", "fp16") else "bf16"


RULE = check
