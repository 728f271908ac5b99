"""Attention stores its whole score matrix, or runs the slowest of the fused kernels.

What it sees: a batched product of queries and keys, a softmax over its result, and everything
else that touches tensors of that size; or the memory-efficient kernel on 16-bit inputs, on a card
that has flash and cuDNN; or a mask that hides what `is_causal` does.
Why it costs: scores are queries x keys per head; writing, scaling, masking and normalizing them
moves them through memory many times. Fused kernels never store them. The memory-efficient one with
a mask takes 3.3 times as long as cuDNN, because it computes the masked half too.
Remedy: `F.scaled_dot_product_attention` with the mask and the dropout that the model has;
is_causal=True only in place of a mask of queries x keys, if that is the causal one.
When it is wrong: sequences are very short, or the model needs the scores themselves. What no fused
kernel takes (fp64, heads above 256, dropout on a CPU) is a note without a gain.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from steplab.core import Finding, units
from steplab.core.dataflow import CAUSAL_MASK
from steplab.costs.op_call import OpCall
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.matmuls import Matmul, matmuls
from steplab.findings.rows import Rows

MIN_LENGTH = 32  # queries or keys
MAX_HEAD_WIDTH = 256  # of the fused kernels
MATH = "aten::_scaled_dot_product_attention_math"
EFFICIENT = "aten::_scaled_dot_product_efficient_attention"
ENTRY = "aten::scaled_dot_product_attention"
HALF_KERNEL = re.compile(r"\bfmha_cutlass[FB]_b?f16_")
# B16 H12 T4096 D64 causal on an H200, forward and backward: 3.55 + 8.32 ms with a dense mask,
# 0.93 + 2.65 by cuDNN, which impl.attention=auto takes.
EFFICIENT_OVER_CUDNN = 3.3
# The same by cuDNN with a mask, T 4096, on an H200: 11.0 ms a step against 3.7 with is_causal.
MASKED_OVER_CAUSAL = 3
# On one core, fp32, forward and backward: 768 queries 1.4 times, 1,024 1.4, 2,048 2.1; 512 and
# fewer fill one block of the kernel, which skips nothing.
MASKED_OVER_CAUSAL_ON_CPU, BLOCK_ON_CPU = 1.4, 512
CPU_MASKS = (2, 4)  # dimensions
CALL = "F.scaled_dot_product_attention"
# Not aten::dropout, which is also called in evaluation, where it does nothing.
DROPOUTS = ("aten::native_dropout", "aten::_fused_dropout", "aten::bernoulli_")

_Shape = tuple[int, int, int]  # elements, and the last two dimensions


def check(case: Case) -> Finding | None:
    """Look for stored scores, else for the slow kernel, else for a mask that costs."""
    return _stored_scores(case) or _slow_kernel(case) or _dense_mask(case)


def _stored_scores(case: Case) -> Finding | None:
    """Add up everything but the products that touches score matrices."""
    rows = case.rows
    sizes = _score_sizes(rows) if rows is not None else set()
    if rows is None or not sizes:
        return None
    shapes = _score_shapes(rows, sizes)
    touching = rows.called(lambda call: any(map(shapes.__contains__, _shapes(call))))
    products = matmuls(rows)
    multiplied = rows.of_calls(products)
    scoring = rows.of_calls(n for n, one in products.items() if _result_size(one) in sizes)
    spent, moved = rows.ms(touching), rows.ms(touching & ~multiplied)
    dropped = any(c.name in DROPOUTS and _is_of(c, sizes) for c in rows.calls)
    refusals = _refusals(case, rows, MATH)
    impossible = list(dict.fromkeys(refusal.why for refusal in refusals if refusal.final))
    if dropped and not case.on_device and not impossible:
        impossible.append("the fused kernel of a CPU has no dropout")
    return Claim(
        rule="attention_unfused",
        claim=f"attention stores its scores: {units.milliseconds(spent)} around them",
        evidence=(_reason(case, rows, "math", MATH), *rows.hot_lines(touching)),
        remedy=_cure(refusals) or _remedy(case, impossible, _is_masked(rows, sizes), dropped),
        stake_ms=spent,
        why=f"{units.milliseconds(moved)} go into moving scores that a fused kernel never stores",
        gain_ms=0.0 if impossible else moved,
        work=touching | scoring,  # a fused kernel replaces both products
    )


def _slow_kernel(case: Case) -> Finding | None:
    """Add up the time of the memory-efficient kernel on 16-bit inputs, on a card that has flash."""
    rows = case.rows
    if rows is None or case.card is None or case.card.peak("bf16") is None:
        return None
    slow = rows.labeled("name", lambda name: HALF_KERNEL.search(name) is not None)
    slow &= ~rows.called(_too_wide)
    if not slow.any():
        return None
    spent = rows.ms(slow)
    return Claim(
        rule="attention_unfused",
        claim=f"attention runs the memory-efficient kernel for {units.milliseconds(spent)}",
        evidence=(_reason(case, rows, "memory-efficient", EFFICIENT), *rows.hot_lines(slow)),
        remedy=_remedy(case, [], _has_square_mask(rows), False),
        stake_ms=spent,
        why=f"with a mask it takes {EFFICIENT_OVER_CUDNN} times cuDNN's time, which takes none",
        gain_ms=spent * (1 - 1 / EFFICIENT_OVER_CUDNN),
        work=slow,
    )


def _dense_mask(case: Case) -> Finding | None:
    """Add up the time of fused kernels whose mask is causal, or that of queries x keys alone."""
    rows = case.rows
    if rows is None:
        return None
    causal = case.verdict(CAUSAL_MASK)
    masked = rows.within(lambda call: call.name == ENTRY and _is_square(call))
    masked &= rows.labeled("category", lambda label: label.startswith("attention"))
    if not case.on_device:
        masked, causal = causal & ~causal, causal & rows.within(_fills_blocks)
    if not (masked | causal).any():
        return None
    is_causal = bool(causal.any())
    masked = rows.with_gradients(masked | causal)
    spent = rows.ms(masked)
    slower = MASKED_OVER_CAUSAL if case.on_device else MASKED_OVER_CAUSAL_ON_CPU
    return Claim(
        rule="attention_unfused",
        claim=f"attention reads a {'causal ' * is_causal}mask for {units.milliseconds(spent)}",
        evidence=(
            "it hides the keys behind each query and nothing else, sampled while the step ran"
            if is_causal
            else "the same mask for all heads and sequences",
            *rows.hot_lines(masked),
        ),
        remedy=f"{CALL}(q, k, v, is_causal=True) without the mask"
        if is_causal
        else _remedy(case, [], True, False),
        stake_ms=spent,
        why="with a mask both halves of the scores are computed, and the mask is read for each",
        gain_ms=spent * (1 - 1 / slower),
        work=masked,
    )


def _fills_blocks(call: OpCall) -> bool:
    """Whether there are more queries than a CPU's kernel takes at once."""
    query = call.tensor(0)
    return call.name == ENTRY and query is not None and query.dims[-2:-1] > (BLOCK_ON_CPU,)


def _is_square(call: OpCall) -> bool:
    query, key, mask = call.tensor(0), call.tensor(1), call.tensor(3)
    if query is None or key is None or mask is None or len(query.dims) < 2 or len(key.dims) < 2:
        return False
    return mask.numel == query.dims[-2] * key.dims[-2] and query.dims[-2] == key.dims[-2]


def _too_wide(call: OpCall) -> bool:
    """Whether the heads are wider than flash and cuDNN support."""
    first = call.tensor(0)
    return first is not None and first.dims[-1:] > (MAX_HEAD_WIDTH,)


def _score_sizes(rows: Rows) -> set[int]:
    """Return the sizes, in elements, of batched products whose result goes into a softmax."""
    # In backward, the gradient of any weights of a mean has that size too.
    forward = set(rows.call[rows.labeled("phase", lambda label: label != "backward")].tolist())
    results = [
        one
        for number, one in matmuls(rows).items()
        if number in forward and len(one.left.dims) == 3 and min(one.m, one.n) >= MIN_LENGTH
    ]
    softmax = {
        (tensor.numel, tensor.dims)
        for call in rows.calls
        if "softmax" in call.name and "log_softmax" not in call.name
        for tensor in call.tensors
        if tensor is not None
    }
    return {size for size, dims in softmax for one in results if _are_scores(size, dims, one)}


def _are_scores(size: int, dims: tuple[int, ...], product: Matmul) -> bool:
    """Whether a softmax's tensor may be that product: as large, with a row of its own length.

    Weights of 16 neighbors in 32 channels may be as many numbers as a product has.
    """
    lengths = product.m, product.n
    return size == _result_size(product) and (
        dims[-1] in lengths or Counter(lengths) <= Counter(dims)
    )


def _score_shapes(rows: Rows, sizes: set[int]) -> set[_Shape]:
    """Return the shapes that scores have in softmaxes and products, and their transposes.

    A table of positions that a bias is looked up in may be as large, and is none of them.
    """
    products = [one for one in matmuls(rows).values() if _result_size(one) in sizes]
    found = {(_result_size(one), one.m, one.n) for one in products}
    found |= {
        shape
        for call in rows.calls
        if "softmax" in call.name
        for shape in _shapes(call)
        if shape[0] in sizes
    }
    return found | {(size, last, first) for size, first, last in found}


def _shapes(call: OpCall) -> Iterator[_Shape]:
    """Yield the elements of a call's tensors, and their last two dimensions."""
    for tensor in call.tensors:
        if tensor is not None and len(tensor.dims) > 1:
            yield tensor.numel, tensor.dims[-2], tensor.dims[-1]


def _result_size(one: Matmul) -> int:
    return one.batch * one.m * one.n


def _is_of(call: OpCall, sizes: set[int]) -> bool:
    """Whether a call has a tensor of one of these sizes."""
    return any(tensor and tensor.numel in sizes for tensor in call.tensors)


def _is_masked(rows: Rows, sizes: set[int]) -> bool:
    """Whether scores meet a tensor of queries x keys: a causal mask, or a bias by position."""
    squares = {one.m * one.n for one in matmuls(rows).values() if _result_size(one) in sizes}
    return _has_square_mask(rows) or any(
        tensor is not None and tensor.numel in squares
        for call in rows.calls
        if _is_of(call, sizes)
        for tensor in call.tensors
    )


def _has_square_mask(rows: Rows) -> bool:
    """Whether torch's attention was given a mask with a row for every query."""
    masks = [call.tensor(3) for call in rows.calls if call.name in (ENTRY, EFFICIENT, MATH)]
    return any(mask is not None and len(mask.dims) > 1 and mask.dims[-2] > 1 for mask in masks)


def _cure(refusals: list[_Refusal]) -> str:
    """Return what makes fused kernels take the inputs; "" where nothing is known to."""
    cures = [refusal.cure for refusal in refusals]
    return cures[0] if cures and all(cures) else ""


def _remedy(case: Case, impossible: list[str], masked: bool, dropped: bool) -> str:
    """Return a call that computes the same, where a fused kernel takes it."""
    if impossible:
        return f"no remedy keeps the model: {', '.join(impossible)}"
    arguments = ["q, k, v"]
    if masked:
        arguments.append("attn_mask")
    if dropped:
        arguments.append("dropout_p=p")
    text = f"{CALL}({', '.join(arguments)})"
    if masked:
        text += ", or is_causal=True instead of the mask if that is the causal one"
    return f"{text}; impl.attention=auto" if case.dispatches("attention") else text


def _reason(case: Case, rows: Rows, path: str, op: str) -> str:
    """Return why no fast kernel ran; `op` is the operator of torch's slow path."""
    recipe = case.run.spec.recipe.techniques if case.run else {}
    asked = recipe.get("impl", {}).get("attention")
    if asked in ("math", "reference", "efficient", "dense_mask"):
        return f"the recipe asks for impl.attention={asked}"
    if not rows.within(lambda call: call.name == op).any():
        return "by hand or by another library: F.scaled_dot_product_attention is not called"
    reasons = dict.fromkeys(refusal.why for refusal in _refusals(case, rows, op))
    return f"torch took its {path} path: {', '.join(reasons) or 'no reason in the trace'}"


class _Refusal(NamedTuple):
    """Why fused kernels refuse some inputs; final: nothing short of another model helps."""

    why: str
    final: bool
    cure: str = ""  # what makes fused kernels take them


def _refusals(case: Case, rows: Rows, op: str) -> list[_Refusal]:
    """Return why torch's attention took the path of `op`, a reason for each distinct call."""
    named = {name: [call for call in rows.calls if call.name == name] for name in (ENTRY, op)}
    if not named[op]:
        return []
    found = (_refusal(call, case.on_device) for call in named[ENTRY] or named[op])
    return [refusal for refusal in found if refusal is not None]


def _refusal(call: OpCall, on_device: bool) -> _Refusal | None:
    """Return why fused kernels refuse these inputs; None if shapes and dtypes do not show it."""
    query, mask = call.tensor(0), call.tensor(3)
    if query is None:
        return None
    width = query.dims[-1]
    if query.dtype == "double":
        return _Refusal("no fused kernel takes fp64", final=True)
    if width > MAX_HEAD_WIDTH:
        why = f"heads are {width} wide, fused kernels take up to {MAX_HEAD_WIDTH}"
        return _Refusal(why, final=True)
    states = [state for state in map(call.tensor, range(3)) if state is not None]
    if any(state.strides and state.strides[-1] != 1 for state in states):
        why = "q, k or v is transposed in memory: fused kernels need its last dimension in order"
        return _Refusal(why, final=False, cure=f"{CALL} with q, k and v after .contiguous()")
    if width % 8 and on_device:
        return _Refusal(f"heads are {width} wide, which is no multiple of 8: pad them", final=False)
    dropout = call.values[4] if len(call.values) > 4 else ""
    if not on_device and dropout and float(dropout) > 0:
        why = f"the CPU's fused kernel has no dropout, and p is {float(dropout):g}"
        return _Refusal(why, final=True)
    if mask is not None and not on_device and len(mask.dims) not in CPU_MASKS:
        why = f"a mask of {len(mask.dims)} dimensions, where the CPU's fused kernel takes 2 or 4"
        return _Refusal(why, final=False, cure=f"{CALL} with attn_mask[None], of 4 dimensions")
    if mask is not None and not on_device:
        why = "the CPU's fused kernel has no gradient of a mask, and this one asks for it"
        return _Refusal(why, final=True)
    if mask is not None:
        return _Refusal(f"a mask of {'x'.join(map(str, mask.dims))} is given", final=False)
    return None


RULE = check
