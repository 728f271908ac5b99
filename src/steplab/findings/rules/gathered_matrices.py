"""There is a matrix for every token or sample, where they share one or a few.

What it sees: an index into a stack of matrices, `weights[expert]`, whose result is a factor of a
batched product with at least four times as many matrices as the stack has; or one matrix that is
expanded to all samples of a batched product; and what else touches tensors of that size.
Why it costs: the copies are read and written once per token, and kept for backward; a product of
one row by a matrix moves the whole matrix for two FLOPs an element. Products of an expanded matrix
are small ones, one for each sample. The gradient has a matrix for each as well, and adds them up.
Remedy: sort the tokens by matrix and multiply each group with its own one (`torch._grouped_mm`, or
a loop over the stack); one product with the samples side by side for one matrix.
When it is wrong: nearly every token has a matrix of its own.
"""

from __future__ import annotations

import numpy as np

from steplab.core import Finding, units
from steplab.costs.op_call import OpCall
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.matmuls import Matmul, attainable_rate, matmuls
from steplab.findings.rows import Mask, Rows

SHARE = 0.03
EXPANDED_SHARE = 0.08  # by rates of products, which differ with their shapes, too
COPIES = 4  # of each matrix, on average
LEAST_ELEMENTS = 1024  # of a matrix
GATHERS = ("aten::index", "aten::index_select", "aten::embedding", "aten::gather")
LEFT = 0.1  # of the time, for products of groups


def check(case: Case) -> Finding | None:
    """Judge matrices that are copied, else one that is expanded."""
    if case.rows is None:
        return None
    return _copied(case, case.rows) or _expanded(case, case.rows)


def _copied(case: Case, rows: Rows) -> Finding | None:
    """Add up what is done with copies of matrices."""
    stacks = {dims for call in rows.calls if (dims := _stack(call))}
    copies = {
        dims: stack
        for one in matmuls(rows).values()
        for dims in (one.left.dims, one.right.dims)
        for stack in stacks
        if _are_copies(dims, stack)
    }
    if not copies:
        return None
    mask = _around(rows, copies)
    spent = case.cost_ms(mask)
    if not spent > SHARE * case.step_ms:
        return None
    dims, stack = max(copies.items(), key=lambda one: one[0][0])
    return Claim(
        rule="gathered_matrices",
        claim=f"{stack[0]} matrices are copied to {dims[0]:,}, one for every row: "
        f"{units.milliseconds(spent)} a step around them",
        evidence=(f"each of {stack[1]} x {stack[2]} elements", *rows.hot_lines(mask)),
        remedy="sort the rows by matrix and multiply each group with its own one: "
        "torch._grouped_mm on a GPU, or a loop over the matrices",
        stake_ms=spent,
        why="every row reads and writes a whole matrix, which its product then reads again",
        gain_ms=(1 - LEFT) * spent,
        work=mask,
    )


def _expanded(case: Case, rows: Rows) -> Finding | None:
    """Compare products of one matrix with every sample with one product for all samples."""
    products = matmuls(rows)
    shared = {number: one for number, one in products.items() if _is_shared(one)}
    forward = rows.of_calls(shared) & rows.labeled("phase", lambda label: label != "backward")
    if not forward.any():
        return None
    sizes = {one.batch * one.m * one.k for one in shared.values()}
    sizes |= {one.batch * one.k * one.n for one in shared.values()}
    backward = rows.with_gradients(forward) & ~forward
    added_up = rows.called(lambda call: call.name == "aten::sum" and bool(sizes & {*call.numels}))
    mask = (
        forward | backward | (added_up & rows.labeled("phase", lambda label: label == "backward"))
    )
    spent = case.cost_ms(mask)
    best = attainable_rate(case, rows.of_calls(products))
    flops = float(np.nansum(rows.work.flops[mask])) / rows.steps
    gain = spent - flops / best if best else 0.0
    if not gain > EXPANDED_SHARE * case.step_ms:
        return None
    most = max(one.batch for one in shared.values())
    return Claim(
        rule="gathered_matrices",
        claim=f"one matrix is multiplied with each of {most:,} samples by itself: "
        f"{units.milliseconds(spent)} a step",
        evidence=("the matrix is expanded: it is the same for all", *rows.hot_lines(mask)),
        remedy="one product for all samples: F.linear over the dimension, transposed to be the "
        'last one, or torch.einsum("st,btc->bsc", weight, x)',
        stake_ms=spent,
        why="each product is a small one, and the gradient is a matrix for every sample, summed "
        "afterwards",
        gain_ms=gain,
        work=mask,
    )


def _is_shared(one: Matmul) -> bool:
    """Whether one factor of a batched product is the same for all samples, the other is not."""
    strides = [factor.strides[0] if factor.strides else None for factor in (one.left, one.right)]
    large = max(one.m * one.k, one.k * one.n) >= LEAST_ELEMENTS
    return one.batch > 1 and large and strides.count(0) == 1 and None not in strides


def _stack(call: OpCall) -> tuple[int, ...]:
    """Return the dimensions of the matrices that a call picks from; () if it picks none."""
    source = call.tensor(0)
    if call.name not in GATHERS or source is None or len(source.dims) != 3:
        return ()
    return source.dims if source.dims[1] * source.dims[2] >= LEAST_ELEMENTS else ()


def _are_copies(dims: tuple[int, ...], stack: tuple[int, ...]) -> bool:
    """Whether a factor is many matrices of the form of those in a stack, transposed or not."""
    alike = len(dims) == 3 and sorted(dims[1:]) == sorted(stack[1:])
    return alike and dims[0] >= COPIES * stack[0]


def _around(rows: Rows, copies: dict[tuple[int, ...], tuple[int, ...]]) -> Mask:
    """Return the gathers with their gradients, and all work on tensors as large as the copies."""
    sizes = {dims[0] * dims[1] * dims[2] for dims in copies}
    gathers = rows.called(lambda call: _stack(call) in copies.values())
    large = rows.called(lambda call: max(call.numels, default=0) in sizes)
    products = rows.of_calls(
        number for number, one in matmuls(rows).items() if one.batch * one.m * one.n in sizes
    )
    return rows.with_gradients(gathers) | large | products


RULE = check
