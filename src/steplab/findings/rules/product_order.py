"""Products are multiplied in an order that takes more work than another.

What it sees: a batched product whose result goes straight into another one, with nothing but copies
in between: (a b) c, where a (b c) would take less than half of the multiplications; a 1 x 1
convolution to fewer than half of the channels, which alone reads what an upsampling has just made;
a linear layer over many rows of which only means or sums are read; or a tall matrix times its own
transpose that is squared, as in the Newton-Schulz steps of Muon, and multiplied by the matrix
again.
Why it costs: linear attention in the wrong order builds the matrix of queries x keys that it is
there to avoid; x x^T of a matrix with four times as many rows as columns is 16 times x^T x, and its
square takes 64 times the multiplications.
Remedy: put the brackets around the small result: q @ (k.transpose(-2, -1) @ v); transpose a tall
matrix first: p(x x^T) x = x p(x^T x) for every polynomial p.
When it is wrong: the values between the products are used by something else.
"""

from __future__ import annotations

import numpy as np

from steplab.core import Finding, units
from steplab.core.dataflow import POOLED
from steplab.costs.op_call import Dims, OpCall
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.matmuls import Matmul, matmuls
from steplab.findings.rows import Mask, Rows
from steplab.findings.rules._shared_lookups import COPIES
from steplab.trace.compiled import INDUCTOR

LOOKUPS = ("aten::embedding",)  # their mean is a bag's: dense_embedding
SHARE = 0.03
LEFT = 0.1  # of a product's time, for the few rows that remain
MUCH = 0.5  # of the multiplications
MOVES = ("elementwise", "copy", "memset", "reduction")
USES = ("elementwise", "reduction", "softmax", "normalization", "sort and index")
# What a polynomial is made of, besides products.
SUMS = ("aten::add", "aten::add_", "aten::sub", "aten::sub_", "aten::clone", "aten::copy_")
SCALES = ("aten::mul", "aten::mul_", "aten::div", "aten::div_", "aten::neg")


def check(case: Case) -> Finding | None:
    """Compare the orders of products that follow each other, and of enlarging and a product."""
    rows = case.rows
    if rows is None:
        return None
    found = _chained(case, rows) or _tall(case, rows)
    return found or _enlarged(case, rows) or _pooled(case, rows)


def _pooled(case: Case, rows: Rows) -> Finding | None:
    """Find linear layers whose results are only added up over their rows."""
    mask = rows.with_gradients(case.verdict(POOLED) & ~rows.asked_for(LOOKUPS.__contains__))
    spent = case.cost_ms(mask)
    gain = (1 - LEFT) * spent
    if not gain > SHARE * case.step_ms:
        return None
    return Claim(
        rule="product_order",
        claim=f"a linear layer takes every row, and only their mean is read: "
        f"{units.milliseconds(spent)}",
        evidence=rows.hot_lines(mask),
        remedy="take the mean first: head(x.mean(1)) instead of head(x).mean(1); both commute",
        stake_ms=spent,
        why="the layer is linear: the mean of its results is its result of the mean",
        gain_ms=gain,
        work=mask,
    )


def _tall(case: Case, rows: Rows) -> Finding | None:
    """Find polynomials of x x^T that are multiplied by x, where x has more rows than columns."""
    forward = rows.labeled("phase", lambda label: label != "backward")
    forward &= ~rows.within(lambda call: call.name.startswith(INDUCTOR))
    numbers = set(np.unique(rows.call[forward]).tolist())
    known = {number: one for number, one in matmuls(rows).items() if number in numbers}
    others = set(np.unique(rows.call[forward & rows.category(*USES, *MOVES)]).tolist())
    mask, gain = np.zeros(len(rows.work), bool), 0.0
    found = []
    own = {(one.batch, one.m, one.k) for one in known.values() if _is_own(one)}
    for batch, m, k in sorted(own, reverse=True):  # of shared squares, the least that is saved
        parts = _parts(
            [(n, one) for n, one in known.items() if (one.batch, one.m) == (batch, m)], k
        )
        used = {n for n in others - parts if _takes_square(rows.calls[n], batch, m)}
        if not parts or not all(_is_linear(rows.calls[n], batch, m) for n in used):
            continue
        products, sums = (rows.of_calls(calls) & forward & ~mask for calls in (parts, used))
        gain += case.cost_ms(products) * (1 - _saved_to(m, k))
        gain += case.cost_ms(sums) * (1 - (k / m) ** 2)
        mask |= products | sums
        found.append((m, k))
    if not found or not gain > SHARE * case.step_ms:
        return None
    spent, (m, k) = case.cost_ms(mask), max(found)
    return Claim(
        rule="product_order",
        claim=f"x @ x.mT of tall matrices is {m:,} x {m:,}, and is squared: "
        f"{units.milliseconds(spent)} around it",
        evidence=(
            f"x has {m:,} rows and {k:,} columns: x.mT @ x is {k:,} x {k:,}",
            f"the other way around {_saved_to(m, k):.2g} of the multiplications",
            *rows.hot_lines(mask),
        ),
        remedy="transpose before, where there are more rows than columns, and back afterward: "
        "x = x.mT if x.size(-2) > x.size(-1) else x",
        stake_ms=spent,
        why="p(x x^T) x = x p(x^T x): the smaller square does the same",
        gain_ms=gain,
        work=mask,
    )


def _is_own(one: Matmul) -> bool:
    """Whether a product can be that of a tall matrix and its own transpose, by its strides."""
    left, right = one.left.strides, one.right.strides
    if one.m != one.n or not one.k <= MUCH * one.m or left is None or right is None:
        return False
    return left[:-2] == right[:-2] and left[-2:] == right[-2:][::-1]


def _parts(products: list[tuple[int, Matmul]], k: int) -> set[int]:
    """Return the calls of x x^T, of its squares and of those by x; none where one is missing.

    `products` have the rows of x. A linear layer has its weight transposed on the right.
    """
    own = [(n, one) for n, one in products if one.k == k and _is_own(one)]
    tall = {one.left.strides for _, one in own}
    square = [n for n, one in products if one.k == one.n == one.m and one.left == one.right]
    last = [n for n, one in products if (one.k, one.n) == (one.m, k) and one.right.strides in tall]
    return {*(n for n, _ in own), *square, *last} if square and last else set()


def _takes_square(call: OpCall, batch: int, m: int) -> bool:
    """Whether a call takes matrices of m x m, as many as a product has."""
    return any(
        t is not None and t.dims[-2:] == (m, m) and t.numel == batch * m * m for t in call.tensors
    )


def _is_linear(call: OpCall, batch: int, m: int) -> bool:
    """Whether a call does with such matrices what a polynomial may: add them and scale them."""
    size = batch * m * m
    scales = call.name in SCALES and sorted(call.numels)[:-1] in ([], [1])
    return call.name in SUMS or (scales and max(call.numels) == size)


def _saved_to(m: int, k: int) -> float:
    """Return the share of multiplications that is left for k columns instead of m rows."""
    return _multiplications(k, m) / _multiplications(m, k)


def _multiplications(m: int, k: int) -> int:
    """Return those of x x^T, of its square and of that by x, for x of m rows and k columns."""
    return m * m * (2 * k + m)


def _enlarged(case: Case, rows: Rows) -> Finding | None:
    """Find 1 x 1 convolutions to fewer channels of what was enlarged right before."""
    forward = rows.labeled("phase", lambda label: label != "backward")
    enlarged = {dims for call in rows.calls if (dims := _upsampled(call))}
    found = [(*_of_pairs(rows, forward, dims), dims) for dims in sorted(enlarged)]
    mask, left, dims = max(found, key=lambda one: rows.ms(one[0]), default=(None, 1.0, ()))
    if mask is None:
        return None
    spent = case.cost_ms(mask)
    if not spent * (1 - left) > SHARE * case.step_ms:
        return None
    shape, channels = " x ".join(map(str, dims)), dims[1]
    return Claim(
        rule="product_order",
        claim=f"an upsampling makes {shape} values, and the 1 x 1 convolution after it keeps "
        f"{left * channels:.0f} of the {channels} channels: both take {units.milliseconds(spent)}",
        evidence=rows.hot_lines(mask),
        remedy="convolve first and enlarge the result: both commute",
        stake_ms=spent,
        why="the enlarged tensor is written, read and kept for backward",
        gain_ms=spent * (1 - left),
        work=mask,
    )


def _of_pairs(rows: Rows, forward: Mask, dims: Dims) -> tuple[Mask, float]:
    """Return the upsamplings to these sizes and the convolutions that alone read their results.

    With their gradients, and with the largest share of the channels that is left. Nothing where
    anything else reads a tensor of these sizes: it may be the same one.
    """
    shares = {n: share for n, call in enumerate(rows.calls) if (share := _narrows(call, dims))}
    enlarging = rows.roots(forward & rows.called(lambda call: _upsampled(call) == dims)).tolist()
    narrowing = rows.roots(forward & rows.of_calls(shares)).tolist()
    reads = forward & rows.called(lambda call: _reads(call, dims))
    reading = rows.roots(reads & ~rows.asked_for(COPIES.__contains__)).tolist()
    order = sorted([*enlarging, *narrowing], key=rows.source.ops.start.__getitem__)
    is_pair = order[::2] == enlarging and order[1::2] == narrowing
    if not narrowing or not is_pair or not set(reading) <= set(order):
        return np.zeros(len(rows.work), bool), 1.0
    return rows.with_gradients(rows.of_roots(order) & forward), max(shares.values())


def _upsampled(call: OpCall) -> Dims:
    """Return the sizes of what an upsampling makes; () for other calls."""
    source, side = call.tensor(0), call.integers(1)
    if not call.name.startswith("aten::upsample_") or "backward" in call.name:
        return ()
    if source is None or not side or len(source.dims) != len(side) + 2:
        return ()
    return (*source.dims[:2], *side)


def _narrows(call: OpCall, dims: Dims) -> float:
    """Return the share of the channels that a 1 x 1 convolution of such a tensor leaves; else 0."""
    source, weight = call.tensor(0), call.tensor(1)
    if "convolution" not in call.name or "backward" in call.name or source is None:
        return 0.0
    if source.dims != dims or weight is None or len(weight.dims) != len(dims):
        return 0.0
    left = weight.dims[0] / dims[1]
    is_plain = weight.dims[1:] == (dims[1], *(1 for _ in dims[2:]))  # one group, one position
    return left if is_plain and left < MUCH else 0.0


def _reads(call: OpCall, dims: Dims) -> bool:
    return any(t is not None and t.dims == dims for t in call.tensors) or any(
        dims in listed for listed in call.lists
    )


def _chained(case: Case, rows: Rows) -> Finding | None:
    known = matmuls(rows)
    # A fused kernel between two products has no operator that tells what it takes.
    generated = rows.within(lambda call: call.name.startswith(INDUCTOR))
    forward = rows.labeled("phase", lambda label: label != "backward") & ~generated
    numbers = set(rows.call[forward].tolist())
    found = [
        (first, second)
        for n, first in known.items()
        for m, second in known.items()
        if n in numbers and m in numbers and _follows(first, second) and _saves(first, second)
    ]
    sizes = {first.batch * first.m * first.n for first, _ in found}
    sizes -= _used(rows, sizes)
    found = [pair for pair in found if pair[0].batch * pair[0].m * pair[0].n in sizes]
    if not found:
        return None
    mask = _around(rows, sizes)
    spent = case.cost_ms(mask)
    first, second = max(found, key=lambda pair: _work(*pair)[0])
    now, then = _work(first, second)
    gain = spent * (1 - then / now)
    if not gain > SHARE * case.step_ms:
        return None
    return Claim(
        rule="product_order",
        claim=f"products in this order build {first.batch} matrices of {first.m:,} x {first.n:,}: "
        f"{units.milliseconds(spent)} around them",
        evidence=(
            f"({first.m} x {first.k}) by ({first.k} x {first.n}) by ({second.k} x {second.n})",
            f"in the other order {then / now:.2g} of the multiplications",
            *rows.hot_lines(mask),
        ),
        remedy="change the order: a @ (b @ c) instead of (a @ b) @ c",
        stake_ms=spent,
        why="the result between the products is larger than the factors",
        gain_ms=gain,
        work=mask,
    )


def _follows(first: Matmul, second: Matmul) -> bool:
    """Whether the second can take the result of the first on its left."""
    same = (second.batch, second.m, second.k) == (first.batch, first.m, first.n)
    return same and len(first.left.dims) == 3 and min(first.m, first.n) > max(first.k, second.n)


def _work(first: Matmul, second: Matmul) -> tuple[int, int]:
    """Return the multiplications of (a b) c and of a (b c)."""
    now = first.m * first.n * (first.k + second.n)
    return now, first.k * second.n * (first.n + first.m)


def _saves(first: Matmul, second: Matmul) -> bool:
    now, then = _work(first, second)
    return then < MUCH * now


def _used(rows: Rows, sizes: set[int]) -> set[int]:
    """Return the sizes that something else than products and copies takes in the forward."""
    forward = rows.labeled("phase", lambda label: label != "backward")
    numbers = np.unique(rows.call[forward & rows.category(*USES)]).tolist()
    return {size for number in numbers for size in rows.calls[number].numels} & sizes


def _around(rows: Rows, sizes: set[int]) -> Mask:
    """Return all work on matrices of these sizes, as inputs or results."""
    results = {
        number
        for number, one in matmuls(rows).items()
        if {one.batch * one.m * one.n, one.left.numel, one.right.numel} & sizes
    }
    moved = rows.called(lambda call: bool(sizes & set(call.numels))) & rows.category(*MOVES)
    return rows.of_calls(results) | moved


RULE = check
