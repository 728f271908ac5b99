"""A pool looks at every number of a wide window for every result.

What it sees: max and average pools over two or three dimensions, with windows so wide, and strides
so short, that pools along one dimension after the other would read at most a quarter as much.
Why it costs: a window of 63 x 63 reads 3,969 numbers for each result, and its neighbor reads all
but 63 of them again. On an H200 one of 16 images of 512 x 512 took 11.0 ms, two pools of 63 took
0.57.
Remedy: one pool for each dimension: the largest of a square is the largest of its rows' largest,
the mean that of its rows' means.
When it is wrong: the place of the maximum is read (`return_indices=True`). Among equal maxima, the
gradient may go to another one.
"""

from __future__ import annotations

import math

import numpy as np

from steplab.core import Finding, units
from steplab.costs.op_call import Dims, OpCall
from steplab.findings.case import Case
from steplab.findings.claims import Claim

SHARE = 0.03
# Of the reads, for pools one after the other: 8 x 8 at a stride of 1. Narrower ones save less: a
# mean over 7 x 7 took 3.1 instead of 4.1 ms on one core, over 15 x 15 4.1 instead of 17.9.
FEWER = 0.25
# What two pools take, over what their reads alone would, as they write and read once more: 0.57 of
# 11.0 ms where 3.2 % of the reads are left, and on one core 6.9 of 19.8 ms with 22 %.
TWO_PASSES = 1.7
# Their second argument is the window, the third the strides.
POOLS = frozenset(
    f"aten::{name}{dims}d{how}"
    for name, how in (("max_pool", "_with_indices"), ("mkldnn_max_pool", ""), ("avg_pool", ""))
    for dims in (2, 3)
)


def check(case: Case) -> Finding | None:
    """Compare what pools read with what pools of one dimension each would."""
    rows = case.rows
    if rows is None:
        return None
    left = {n: part for n, call in enumerate(rows.calls) if (part := _left(call)) <= FEWER}
    pools = {number: rows.with_gradients(rows.of_calls([number])) for number in left}
    mask = np.logical_or.reduce([*pools.values(), rows.inside & False])
    gain = sum((1 - TWO_PASSES * left[n]) * case.cost_ms(one) for n, one in pools.items())
    if not gain > SHARE * case.step_ms:
        return None
    spent = case.cost_ms(mask)
    widest = rows.calls[min(left, key=left.__getitem__)]
    window, stride = (" x ".join(map(str, dims)) for dims in _window(widest))
    return Claim(
        rule="wide_pooling",
        claim=f"pools with wide windows take {units.milliseconds(spent)} a step",
        evidence=(
            f"{widest.name} with a window of {window} and a stride of {stride}: "
            f"{math.prod(_window(widest)[0]):,} reads for each result",
            *rows.hot_lines(mask),
        ),
        remedy="pool along one dimension after the other: max_pool2d(max_pool2d(x, (1, k), (1, s), "
        "(0, p)), (k, 1), (s, 1), (p, 0)) gives the same, and so it is with avg_pool2d",
        stake_ms=spent,
        why="neighboring windows share nearly all that they read, and a square is read once for "
        "every result",
        gain_ms=gain,
        work=mask,
    )


def _window(call: OpCall) -> tuple[Dims, Dims]:
    """Return the window and the strides of a pool; nothing where a call is none."""
    window = call.integers(1) if call.name in POOLS else None
    if not window:
        return (), ()
    # One number stands for all dimensions; no stride is that of the window.
    size = 3 if "3d" in call.name else 2
    stride = call.integers(2) or window
    return window * (size // len(window)), stride * (size // len(stride))


def _left(call: OpCall) -> float:
    """Return the part of its reads that a pool would need along one dimension after the other.

    The last dimension first: its pass has a result for every place of the dimensions before it,
    which is as many times the final ones as their strides.
    """
    window, stride = _window(call)
    if len(window) < 2 or min(window) < 1:
        return math.inf
    reads = sum(size * math.prod(stride[:place]) for place, size in enumerate(window))
    return reads / math.prod(window)


RULE = check
