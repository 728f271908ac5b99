"""Tensors are copied without being changed.

What it sees: copies inside the device (`contiguous`, `clone`, `reshape` of a transposed tensor)
and copies between host and device that nothing hides; lookups of rows in a table that lies column
by column; images that the code copies from channels-last to channels-first and a later operator of
the forward copies back; an expanded tensor that is joined to others, seen by its gradient, a sum
over the dimension that it was expanded along.
Why it costs: a copy reads and writes the whole tensor and computes nothing. Operators that are
given images in both orders take four to five times as long, and products with copies of a row
compute the same again.
Remedy: order dimensions so that no copy is needed, use views; `channels_last` where convolutions
reorder their inputs themselves, and no `contiguous()` on the way; a list that is joined once where
a tensor grows in a loop; the parts of a weight instead of a joined tensor; for copies from the
host, pinned memory and a stream of their own.
When it is wrong: the copy makes the products after it faster than they would be without it. Copies
that operators make for themselves, and those of transposed heads, are the price of running op by
op: up to 9 % of a clean decoder's step and 24 % of a convolutional one's. A fault is what the code
asks for above 10 % of the step, or a copy between host and device that nothing hides.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import numpy as np

from steplab.core import Finding, units
from steplab.costs.op_call import Dims, OpCall, TensorArg
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.matmuls import FACTORS, matmuls
from steplab.findings.rows import Mask, Rows, changes_dtype
from steplab.trace.analysis import UNATTRIBUTED

# Eager attention and its backward copy transposed heads: 2 to 4 % of a decoder's step.
SHARE = 0.05
ASKED_SHARE = 0.10
LARGE_TABLE = 2**20  # elements: less stays in a cache
IN_PIECES = 0.9  # saved: 8,192 of 200,000 rows of 128 take 0.56 instead of 5.27 ms on one core
GROWN = 8  # sizes of what one line joins in a step
ASKED = frozenset(
    f"aten::{name}"
    for name in "contiguous clone copy_ reshape repeat repeat_interleave tile cat stack roll flip "
    "to constant_pad_nd pad hstack vstack concat".split()
)
FLATTENS = frozenset(("aten::flatten", "aten::ravel"))  # copy what cannot be viewed
COPY, CAT, SUM = "aten::copy_", "aten::cat", "aten::sum"
EXPANDS = frozenset(f"aten::{name}" for name in "expand expand_as broadcast_to".split())
FIRST, LAST = "channels-first", "channels-last"
# Of the time of operators on images in both orders, where they have one: on an H200 an addition of
# 103 million numbers took 0.14 instead of 0.75 ms, a batch norm's gradient 0.35 instead of 1.30.
IN_ONE_ORDER = 0.25
EXPANDED = 8  # copies of a row, below which two products instead of one may not pay
# What cuDNN and MIOpen launch around a convolution whose input lies in the other order.
CONVOLUTION_LAYOUT = re.compile(r"nchwToNhwc|nhwcToNchw|batched_transpose_\d|tensorTransform")


def check(case: Case) -> tuple[Finding, ...]:
    """Look for work that only moves tensors, and for rows that are gathered from far apart."""
    if case.rows is None:
        return ()
    found = (
        _copied(case, case.rows),
        _gathered(case, case.rows),
        _turned(case, case.rows),
        _joined(case, case.rows),
    )
    return tuple(finding for finding in found if finding is not None)


def _gathered(case: Case, rows: Rows) -> Finding | None:
    """Judge lookups in tables whose rows are not in one piece."""
    mask = rows.called(_takes_columns)
    spent = case.cost_ms(mask)
    if not spent > ASKED_SHARE * case.step_ms:
        return None
    return Claim(
        rule="copies",
        claim=f"rows are gathered from a table that lies column by column: "
        f"{units.milliseconds(spent)} a step",
        evidence=rows.hot_lines(mask),
        remedy="make the table contiguous once, before the loop: np.ascontiguousarray, "
        ".contiguous()",
        stake_ms=spent,
        why="every number of a row is in another line of the cache",
        gain_ms=IN_PIECES * spent,
        work=mask,
    )


def _takes_columns(call: OpCall) -> bool:
    """Whether a call looks up rows of a large table that is in the other order."""
    table = call.tensor(0)
    if call.name not in ("aten::index", "aten::index_select") or table is None:
        return False
    if not table.strides or len(table.dims) != 2 or table.numel < LARGE_TABLE:
        return False
    return table.strides[1] > table.strides[0] and table.dims[1] > 1


def _copied(case: Case, rows: Rows) -> Finding | None:
    """Add up the time of work that only moves tensors."""
    # Copies by the copy engine count only where nothing hides them: a term of the budget.
    engine = rows.labeled("name", lambda label: label.startswith("Memcpy"))
    # On a CPU a product copies its bias into the result: that is part of the product.
    own = rows.within(lambda call: call.name in FACTORS)
    # Contiguous copies in backward are autograd's own: gradients of a square, the first of a sum.
    backward = rows.labeled("phase", lambda label: label == "backward")
    own |= backward & ~rows.called(_reorders)
    moved = rows.category("copy") & ~rows.called(changes_dtype) & ~own & ~engine & _known(rows)
    within, alone = rows.ms(moved), case.term_ms("copies")
    if not within + alone > SHARE * case.step_ms:
        return None
    asked = rows.ms(moved & rows.asked_for(lambda name: name in ASKED))
    groups = rows.totals("name", engine, 2) if alone > within else []
    evidence = [f"{g.label}: {g.count:.3g} a step, {units.milliseconds(g.ms)}" for g in groups]
    evidence += [*rows.hot_lines(engine if alone > within else moved), *_layouts(rows, moved)]
    evidence += _held(case, rows, moved)
    return Claim(
        rule="copies",
        claim=f"copies take {units.milliseconds(within + alone)} a step",
        evidence=tuple(evidence),
        remedy=_remedy(rows, moved, engine if alone > within else moved & False),
        stake_ms=within + alone,
        why="a copy reads and writes a whole tensor and computes nothing",
        gain_ms=within + alone,
        work=moved,
        ordinary=asked < ASKED_SHARE * case.step_ms and alone < SHARE * case.step_ms,
    )


def _turned(case: Case, rows: Rows) -> Finding | None:
    """Judge images that change their order in memory back and forth."""
    forward = rows.labeled("phase", lambda label: label != "backward")
    asked = rows.asked_for(lambda name: name in ASKED | FLATTENS)
    first = rows.called(lambda call: _change(call) == FIRST) & forward & asked
    last = rows.called(lambda call: _change(call) == LAST) & forward
    shapes = _targets(rows, first) & _targets(rows, last)
    if not shapes:  # one change on the way to a linear layer needs no other one back
        return None
    moved = rows.called(lambda call: bool(_change(call)) and _dims(call) in shapes)
    mixed = rows.called(lambda call: call.name != COPY and _has_both(call, shapes))
    gain = case.cost_ms(moved) + (1 - IN_ONE_ORDER) * case.cost_ms(mixed)
    if not gain > SHARE * case.step_ms:
        return None
    first &= moved
    both = units.milliseconds(rows.ms(mixed))
    shape = "x".join(map(str, max(shapes, key=math.prod)))
    return Claim(
        rule="copies",
        claim=f"images are copied from channels-last to channels-first and back: "
        f"{units.milliseconds(rows.ms(moved | mixed))} a step",
        evidence=(
            f"{rows.count(first):.3g} copies to channels-first a step that the code asks for, "
            f"{rows.count(last & moved):.3g} back in the forward, of {shape}",
            *rows.hot_lines(first),
            f"{rows.count(moved):.3g} copies in all: {units.milliseconds(rows.ms(moved))}",
            *([f"kernels that are given both orders: {both}"] if mixed.any() else []),
        ),
        remedy="keep torch.channels_last: no contiguous() and no view() or flatten() of such an "
        "image; x.mean((2, 3)) instead of x.flatten(2).mean(2), contiguous(memory_format="
        "torch.channels_last) where one is needed",
        stake_ms=rows.ms(moved | mixed),
        why="contiguous() means channels-first; convolutions of channels-last weights copy it back "
        "and their gradients go the same way",
        gain_ms=gain,
        work=moved | mixed,
    )


def _change(call: OpCall) -> str:
    """Return the order into which a call copies an image from the other one; "" if it does not."""
    target, source = call.tensor(0), call.tensor(1)
    if call.name != COPY or target is None or source is None or target.dims != source.dims:
        return ""
    orders = (_order(target), _order(source))
    return orders[0] if set(orders) == {FIRST, LAST} else ""


def _order(tensor: TensorArg) -> str:
    """Return in which order the numbers of an image lie in memory; "" if it is none, or in both."""
    dims, strides = tensor.dims, tensor.strides
    if len(dims) not in (4, 5) or not strides or dims[1] == 1 or math.prod(dims[2:]) == 1:
        return ""
    places = {FIRST: range(len(dims)), LAST: (0, *range(2, len(dims)), 1)}
    for order, outer_first in places.items():
        dense = 1
        for place in reversed(outer_first):
            if dims[place] > 1 and strides[place] != dense:
                break
            dense *= dims[place]
        else:
            return order
    return ""


def _has_both(call: OpCall, shapes: set[Dims]) -> bool:
    """Whether a call is given images of one of these shapes in both orders."""
    images = [t for t in call.tensors if t is not None and t.dims in shapes]
    return {_order(image) for image in images} >= {FIRST, LAST}


def _dims(call: OpCall) -> Dims:
    target = call.tensor(0)
    return target.dims if target is not None else ()


def _targets(rows: Rows, mask: Mask) -> set[Dims]:
    """Return the shapes of what the rows in `mask` write."""
    return {_dims(rows.calls[number]) for number in np.unique(rows.call[mask])}


class _Join(NamedTuple):
    """A call that joins tensors, one of which repeats the rows of a smaller one."""

    call: int
    numel: int  # of the result
    share: float  # of the result that is repeated
    times: int


def _joined(case: Case, rows: Rows) -> Finding | None:
    """Judge expanded tensors that are joined to others, and the products with the result."""
    joins = _expanded_parts(rows)
    moved = rows.of_calls(one.call for one in joins)
    gain, products = case.cost_ms(moved), moved & False
    factors = matmuls(rows)
    for size, share, times in {(one.numel, one.share, one.times) for one in joins}:
        calls = [n for n, one in factors.items() if size in (one.left.numel, one.right.numel)]
        forward = rows.labeled("phase", lambda label: label != "backward")
        taken = rows.with_gradients(rows.of_calls(calls) & forward)
        gain += share * (1 - 1 / times) * rows.ms(taken & ~products)
        products |= taken
    if not products.any() or not gain > SHARE * case.step_ms:
        return None
    most = max(joins, key=lambda one: one.numel)
    return Claim(
        rule="copies",
        claim=f"rows are expanded {most.times:,} times and joined to others: "
        f"{units.milliseconds(rows.ms(moved | products))} a step with the products after it",
        evidence=(
            f"{units.percent(most.share)} of the result of torch.cat repeat what a smaller tensor "
            "holds",
            *rows.hot_lines(moved),
            *_held(case, rows, moved),
            f"products with it: {units.milliseconds(rows.ms(products))}",
        ),
        remedy="split the layer behind it: F.linear(rows, w[:, :n]) + F.linear(shared, w[:, n:], "
        "b)[:, None] computes the shared part once and broadcasts the sum",
        stake_ms=rows.ms(moved | products),
        why="the copies are written, multiplied one by one and kept for the backward",
        gain_ms=gain,
        work=moved,
    )


def _expanded_parts(rows: Rows) -> list[_Join]:
    """Return joins of which a part was expanded: its gradient, a slice, is summed up again."""
    backward = rows.labeled("phase", lambda label: label == "backward")
    joins = np.unique(rows.call[rows.called(lambda call: call.name == CAT) & ~backward])
    sums = rows.called(lambda call: call.name == SUM) & backward
    sums &= rows.asked_for(EXPANDS.__contains__)
    summed = [rows.calls[number] for number in np.unique(rows.call[sums])]
    found = []
    for number in joins.tolist():
        call = rows.calls[number]
        parts: tuple[Dims, ...] = call.lists[0] if call.lists else ()
        dim, ranks = call.integer(1), {len(part) for part in parts}
        # A product splits along the features; a token in front of a sequence is joined elsewhere.
        if len(parts) < 2 or len(ranks) > 1 or dim not in (-1, max(ranks) - 1):
            continue
        dim = max(ranks) - 1
        joined, numel = sum(part[dim] for part in parts), sum(math.prod(part) for part in parts)
        for one in summed:
            gradient, over = one.tensor(0), one.integers(1)
            if gradient is None or not over or gradient.dims not in parts or dim in over:
                continue
            if not all(abs(place) < len(gradient.dims) for place in over):
                continue
            times = math.prod(gradient.dims[place] for place in over)
            if times >= EXPANDED and _is_slice(gradient, dim, joined):
                found.append(_Join(number, numel, gradient.numel / numel, times))
    return found


def _is_slice(gradient: TensorArg, dim: int, joined: int) -> bool:
    """Whether a tensor is a part of one that has `joined` numbers along `dim`."""
    whole, dense = list(gradient.dims), 1
    whole[dim] = joined
    for place in reversed(range(len(whole))):
        if gradient.strides is None or gradient.strides[place] != dense:
            return False
        dense *= whole[place]
    return True


def _held(case: Case, rows: Rows, moved: Mask) -> list[str]:
    """Return what the copies of the longest line hold at the peak, for the backward."""
    totals = rows.totals("line", moved & (rows.work.line > 0), 1)
    blocks = case.timeline.at_peak if case.timeline is not None else ()
    kept = [one for one in blocks if one.kind == "activations"]
    held = sum(one.bytes for one in kept if totals and one.line == totals[0].label)
    peak = case.timeline.peak_bytes if case.timeline is not None else 0
    if not held > SHARE * peak:
        return []
    return [
        f"{totals[0].label} holds {units.bytes_(held)} until the backward, "
        f"{units.percent(held / peak)} of the step's peak"
    ]


def _known(rows: Rows) -> Mask:
    """Return the work whose operator is known: in a replay, a cast looks like a copy."""
    return rows.labeled("op", lambda label: label != UNATTRIBUTED)


def _remedy(rows: Rows, moved: Mask, sent: Mask) -> str:
    """Return what avoids most of the time; `sent` are copies of the copy engine, if they count."""
    names = [total.label for total in rows.totals("name", sent, 1)]
    if any("Pageable" in name for name in names):
        return "pin the memory of the host (pin_memory=True) and copy with non_blocking=True"
    if any("HtoD" in name for name in names):
        return "copy the next batch on a stream of its own while this one computes"
    if any("DtoH" in name for name in names):
        return "keep it on the device, or copy it every N steps"
    if 2 * rows.ms(moved & _growing(rows)) > rows.ms(moved):
        return (
            "append to a list and call torch.cat once, behind the loop: what grows is copied whole"
        )
    if 2 * rows.ms(moved & rows.called(lambda call: call.name == "aten::cat")) > rows.ms(moved):
        return (
            "give the parts to what follows one by one (a @ w[:n] + b @ w[n:], a sum of their "
            "sums), or write them into one tensor as they are made"
        )
    inside = rows.labeled("name", lambda name: CONVOLUTION_LAYOUT.search(name) is not None)
    if 2 * rows.ms(moved & inside) > rows.ms(moved):
        return "keep model and inputs in the order of the convolutions: torch.channels_last"
    return "use views and an order of dimensions that needs no copy"


def _growing(rows: Rows) -> Mask:
    """Return the work of lines that join tensors again and again, each time to another size."""
    joins = rows.called(lambda call: call.name == "aten::cat")
    lines = np.unique(np.stack([rows.work.line[joins], rows.call[joins]]), axis=1)[0]
    found, sizes = np.unique(lines, return_counts=True)
    grown: Mask = joins & np.isin(rows.work.line, found[sizes >= GROWN])
    return grown


def _layouts(rows: Rows, moved: Mask) -> list[str]:
    """Return a line about the copies of transposed tensors, if there are any."""
    strided = moved & rows.called(_reorders)
    if not strided.any():
        return []
    count, ms = rows.count(strided), units.milliseconds(rows.ms(strided))
    return [f"{count:.3g} of them a step bring a transposed tensor into order, {ms}"]


def _reorders(call: OpCall) -> bool:
    """Whether a call copies from a tensor whose dimensions are not in memory order."""
    source = call.tensor(1) if call.name == "aten::copy_" else call.tensor(0)
    if source is None or not source.strides:
        return False
    steps = [step for size, step in zip(source.dims, source.strides, strict=False) if size > 1]
    return 0 not in steps and steps != sorted(steps, reverse=True)


RULE = check
