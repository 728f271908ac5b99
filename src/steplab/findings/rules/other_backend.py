"""A different attention kernel ran than the recipe asks for.

What it sees: `impl.attention` in the recipe, and a trace that shows another backend.
Why it costs: the measured time is of another kernel; flash takes 1.6 times as long as cuDNN on an
H200.
Remedy: put the kernel's own op into the graph; clear the compile cache.
When it is wrong: never seen; a kernel whose name is unknown gives no finding.
"""

from __future__ import annotations

from steplab.core import Finding
from steplab.findings.case import Case
from steplab.hardware.kernel_names import FUSED_ATTENTION, traced_attention

FREE = (None, "auto", "dense_mask")  # these name no kernel: torch or we choose one


def check(case: Case) -> Finding | None:
    """Compare the recipe with the attention that the trace shows."""
    settings = case.run.spec.recipe.techniques.get("impl", {}) if case.run else {}
    asked, seen = settings.get("attention"), _seen(case)
    others = sorted(seen - {str(asked)})
    if asked in FREE or not others:
        return None
    compiled = "compile" in case.run.spec.recipe.techniques if case.run else False
    evidence = [f"the trace shows {', '.join(sorted(seen))}"]
    evidence += ["the model was compiled: a graph out of the cache keeps its kernel"] * compiled
    return Finding(
        rule="other_backend",
        claim=f"attention {asked} was asked for, {' and '.join(others)} ran",
        evidence=tuple(evidence),
        remedy="call the kernel's own op in the graph; torch.compiler.reset() and a fresh cache",
        stake_ms=_attention_ms(case),
        why="a context such as sdpa_kernel(...) is no part of the compile cache's key",
    )


def _seen(case: Case) -> set[str]:
    """Return the fused backends that ran, by operator, kernel or category."""
    seen = traced_attention(case.run.ran if case.run else None)
    if case.rows is not None:
        labels = {g.label for g in case.rows.totals("category", case.rows.inside, most=100)}
        seen |= {impl for impl in FUSED_ATTENTION if f"attention {impl}" in labels}
    return seen


def _attention_ms(case: Case) -> float | None:
    if case.rows is None:
        return None
    mask = case.rows.labeled("category", lambda label: label.startswith("attention"))
    return case.rows.ms(mask) if mask.any() else None


RULE = check
