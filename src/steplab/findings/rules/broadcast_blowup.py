"""A broadcast makes a tensor that only a sum over it needs.

What it sees: an operator whose inputs are spread over each other, so that its result has at least
16 times the elements of the larger one (an expanded input, as those that `F.cosine_similarity`
makes, has the elements that it was expanded from), or `unfold` with windows that overlap as much;
and everything else that touches tensors of that size. A sum, or another reduction, takes it in
the forward pass; no softmax and no product does. The largest of them, as the best overlap of two
boxes, is no sum: it needs every value, but for windows, whose largest is a pooling.
Why it costs: the result is written, read by every operator after it, and kept for backward.
Remedy: do the sum inside a matrix product: |x - c|^2 = |x|^2 - 2 x.c + |c|^2, `torch.cdist`,
`einsum`; pooling or a convolution instead of windows; or in chunks.
When it is wrong: the values are needed one by one. Small tensors are not meant.
"""

from __future__ import annotations

import math

import numpy as np

from steplab.core import Finding, units
from steplab.costs.op_call import OpCall, broadcast
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.matmuls import matmuls
from steplab.findings.rows import Mask, Rows

SPREAD = 16
UNFOLD = "aten::im2col"
LEAST_BYTES = 64 * 2**20
LEAST_BYTES_CPU = 2**20
SHARE = 0.03
SPREADS = frozenset(
    f"aten::{name}" for name in "add sub mul div maximum minimum eq ne lt gt".split()
)
MOVES = ("elementwise", "reduction", "copy", "memset", "other")
LEFT = 0.1  # of the time, for the product that replaces it
EXTREMES = frozenset(
    f"aten::{name}" for name in "max min amax amin aminmax argmax argmin median kthvalue".split()
)


def check(case: Case) -> Finding | None:
    """Add up what is done with the largest tensors that come from a broadcast."""
    rows = case.rows
    if rows is None:
        return None
    least = LEAST_BYTES if case.on_device else LEAST_BYTES_CPU
    # In backward torch expands by itself: the gradient of a mean is one number for many.
    forward = rows.labeled("phase", lambda label: label != "backward")
    calls = [rows.calls[number] for number in np.unique(rows.call[forward])]
    windows = {_spread(call, least) for call in calls if call.name == UNFOLD}
    sizes = {size for call in calls if (size := _spread(call, least))} - _taken(rows)
    sizes &= _reduced(rows, forward, windows)
    if not sizes:
        return None
    mask = rows.category(*MOVES) & rows.called(lambda call: max(call.numels, default=0) in sizes)
    mask |= rows.with_gradients(_made(rows, least, sizes))
    spent = case.cost_ms(mask)
    if not spent > SHARE * case.step_ms:
        return None
    largest = max(sizes)
    return Claim(
        rule="broadcast_blowup",
        claim=f"a broadcast makes tensors of {largest:,} elements: {units.milliseconds(spent)} a "
        "step around them",
        evidence=(*_shapes(rows, sizes, least), *rows.hot_lines(mask)),
        remedy="sum inside a matrix product (|x|^2 - 2 x.c + |c|^2, torch.cdist, einsum; "
        "F.normalize(x) @ F.normalize(y).T for cosines); "
        "F.avg_pool2d or a convolution instead of F.unfold; or chunks",
        stake_ms=spent,
        why="it is written, read again by every operator after it, and kept for backward",
        gain_ms=(1 - LEFT) * spent,
        work=mask,
    )


def _spread(call: OpCall, least: int) -> int:
    """Return the elements of a result that is much larger than its inputs; 0 if it is not."""
    first, second = call.tensor(0), call.tensor(1)
    if call.name == UNFOLD and first is not None:
        window, stride = call.integers(1), call.integers(4)
        size = first.numel * math.prod(window or ()) // max(math.prod(stride or ()), 1)
        return size if size >= SPREAD * first.numel and size * first.item >= least else 0
    if call.name not in SPREADS or first is None or second is None:
        return 0
    size = math.prod(broadcast(first.dims, second.dims))
    larger = max(first.bytes // first.item, second.bytes // second.item)
    if min(first.numel, second.numel) == 1:
        return 0  # times a number: who expanded the other one needs its values
    return size if size >= SPREAD * larger and size * first.item >= least else 0


def _made(rows: Rows, least: int, sizes: set[int]) -> Mask:
    """Return the operators that make such results from small inputs."""
    return rows.called(lambda call: _spread(call, least) in sizes)


def _reduced(rows: Rows, forward: Mask, windows: set[int]) -> set[int]:
    """Return sizes of tensors that are summed up: others are needed element by element.

    Of `windows`, also those of which the largest is taken.
    """
    numbers = np.unique(rows.call[forward & rows.category("reduction")])
    calls = [rows.calls[number] for number in numbers]
    sizes = {max(call.numels, default=0) for call in calls}
    summed = {max(call.numels, default=0) for call in calls if call.name not in EXTREMES}
    return summed | (sizes & windows)


def _taken(rows: Rows) -> set[int]:
    """Return sizes of tensors that a softmax, an attention or a product takes: scores and masks."""
    takes = ("softmax", "scaled_dot_product")
    attends = [call for call in rows.calls if any(name in call.name for name in takes)]
    found = {tensor.numel for call in attends for tensor in call.tensors if tensor}
    for one in matmuls(rows).values():
        found |= {one.left.numel, one.right.numel}
    return found


def _shapes(rows: Rows, sizes: set[int], least: int) -> list[str]:
    calls = [call for call in rows.calls if _spread(call, least) in sizes][:2]
    texts = []
    for call in calls:
        shapes = " and ".join("x".join(map(str, t.dims)) for t in call.tensors[:2] if t)
        texts.append(f"{call.name} of {shapes}")
    return texts


RULE = check
