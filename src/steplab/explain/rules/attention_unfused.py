"""Attention computes and stores its whole score matrix.

What it sees: a batched product of queries and keys, a softmax over its result, and everything
else that touches tensors of that size.
Why it costs: scores are queries x keys per head; writing, scaling, masking and normalising them
moves them through memory many times. Fused kernels never store them.
Remedy: `F.scaled_dot_product_attention` with 16-bit inputs and is_causal instead of a mask.
When it is wrong: very short sequences, or scores that the model itself needs.
"""

from __future__ import annotations

from steplab import units
from steplab.explain.case import Case
from steplab.explain.places import places
from steplab.explain.products import numbered, products
from steplab.explain.rows import Rows
from steplab.record import Finding
from steplab.trace.shapes import Call

SHORTEST = 32  # queries or keys
LARGEST_HEAD = 256  # of the fused kernels
MATH = "aten::_scaled_dot_product_attention_math"
ENTRY = "aten::scaled_dot_product_attention"


def check(case: Case) -> Finding | None:
    """Add up all but the products that touch score matrices."""
    rows = case.rows
    sizes = _score_sizes(rows) if rows is not None else set()
    if rows is None or not sizes:
        return None
    touching = rows.called(lambda call: any(t and t.numel in sizes for t in call.tensors))
    multiplied = numbered(rows, set(products(rows)))
    spent, moved = rows.ms(touching), rows.ms(touching & ~multiplied)
    return Finding(
        rule="attention_unfused",
        claim=f"attention stores its scores: {units.milliseconds(spent)} around them",
        evidence=(_reason(case, rows), *places(rows, touching)),
        remedy="F.scaled_dot_product_attention(q, k, v, is_causal=True), or impl.attention=auto",
        stake_ms=spent,
        why=f"{units.milliseconds(moved)} go into moving scores that a fused kernel never stores",
        gain_ms=moved,
    )


def _score_sizes(rows: Rows) -> set[int]:
    """Elements of those results of batched products that a softmax takes."""
    softmax = {
        tensor.numel
        for call in rows.calls
        if "softmax" in call.name and "log_softmax" not in call.name
        for tensor in call.tensors
        if tensor is not None
    }
    results = {
        one.batch * one.m * one.n
        for one in products(rows).values()
        if len(one.left.dims) == 3 and min(one.m, one.n) >= SHORTEST
    }
    return softmax & results


def _reason(case: Case, rows: Rows) -> str:
    """Why no fused kernel ran, as far as the trace tells."""
    recipe = case.run.spec.recipe.techniques if case.run else {}
    asked = recipe.get("impl", {}).get("attention")
    if asked in ("math", "reference"):
        return f"the recipe asks for impl.attention={asked}"
    if not rows.within(lambda call: call.name == MATH).any():
        return "the scores are computed by hand; F.scaled_dot_product_attention is not called"
    entries = [call for call in rows.calls if call.name in (ENTRY, MATH)]
    refusals = (_refusal(call, case.on_device) for call in entries)
    reasons = dict.fromkeys(reason for reason in refusals if reason)
    return f"torch took its math path: {', '.join(reasons) or 'no reason in the trace'}"


def _refusal(call: Call, on_device: bool) -> str:
    """Why the fused kernels refuse these inputs; "" when shapes and dtypes do not tell."""
    query, mask = call.tensor(0), call.tensor(3)
    if query is None:
        return ""
    if query.dtype == "double":
        return "no fused kernel takes fp64"
    if query.dims[-1] > LARGEST_HEAD:
        return f"heads are {query.dims[-1]} wide, fused kernels take up to {LARGEST_HEAD}"
    if query.dims[-1] % 8:
        return f"heads are {query.dims[-1]} wide, which is no multiple of 8"
    dropout = call.values[4] if len(call.values) > 4 else ""
    if not on_device and dropout and float(dropout) > 0:
        return f"the CPU's fused kernel has no dropout, and p is {float(dropout):g}"
    if mask is not None:
        return f"a mask of {'x'.join(map(str, mask.dims))} is given"
    return ""


RULE = check
