"""Norms, sums and softmaxes go through memory in another order than it lies in.

What it sees: normalizations and reductions of a transposed tensor, which is no image in
channels_last, that take more than eight times as long as their bytes at the card's bandwidth; and
what brings tensors into order on the same lines. A softmax along a dimension that is not the last,
of a tensor whose memory has that dimension last: the copies that bring it, and its gradient, into
the other order.
Why it costs: kernels for such tensors read numbers that are far apart. The gradient of
`BatchNorm1d` on a transposed (batch, time, channel) took 24 times its bytes on an H200; on rows of
channels it took 3 times.
Remedy: give the norm rows, `norm(x.flatten(0, 1)).view_as(x)`, or keep the channels where it wants
them; give the loss rows of logits, `cross_entropy(logits.flatten(0, 1), targets.flatten())`.
When it is wrong: what follows the norm needs the transposed order, and would have to copy. Small
tensors are not meant: no kernel reaches the bandwidth there.
"""

from __future__ import annotations

import numpy as np

from steplab.core import Finding, units
from steplab.costs.op_call import OpCall
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.rows import Mask, Rows, changes_dtype
from steplab.hardware.catalog import Card

SHARE = 0.05
COPY = "aten::copy_"
SOFTMAXES = ("aten::_softmax", "aten::_log_softmax")
GRADIENTS = ("aten::_softmax_backward_data", "aten::_log_softmax_backward_data")
SMALL = 16 * 2**20  # bytes, 3.5 us of an H200
SLOW = 8  # times the time of the bytes
IN_ORDER = 4.5  # the same for batch norm of rows of channels, forward and backward: 8.7 for 2.0 ms


def check(case: Case) -> tuple[Finding, ...]:
    """Look at norms and at softmaxes."""
    found = (_norms(case), _softmaxes(case))
    return tuple(finding for finding in found if finding is not None)


def _softmaxes(case: Case) -> Finding | None:
    """Add up the copies of what a softmax is given transposed, and of its gradient."""
    rows = case.rows
    if rows is None:
        return None
    given = [call for call in rows.calls if _is_across(call)]
    sizes = {call.numels[0] for call in given}
    softmaxes = rows.called(_is_across) | rows.called(lambda call: _is_gradient(call, given))
    moved = rows.called(lambda call: call.name == COPY and call.numels[:1] in {(n,) for n in sizes})
    moved &= rows.called(_is_transposed) & ~rows.called(changes_dtype)
    gain = case.cost_ms(moved)
    if not gain > SHARE * case.step_ms:
        return None
    largest = max((t for call in given if (t := call.tensor(0))), key=lambda t: t.numel)
    shape = "x".join(map(str, largest.dims))
    return Claim(
        rule="transposed_norm",
        claim=f"a softmax of transposed numbers takes {units.milliseconds(gain)} of copies a step",
        evidence=(
            f"of {shape}, along a dimension that lies last in memory and is not the last",
            *rows.hot_lines(softmaxes | moved),
        ),
        remedy="flatten the other dimensions and leave the classes last: "
        "cross_entropy(logits.flatten(0, 1), targets.flatten()) instead of "
        "cross_entropy(logits.transpose(1, 2), targets)",
        stake_ms=gain + rows.ms(softmaxes),
        why="it is copied into the other order before the softmax, and its gradient back after it",
        gain_ms=gain,
        work=softmaxes | moved,
    )


def _is_across(call: OpCall) -> bool:
    """Whether a softmax is along a dimension that lies last in memory only."""
    tensor, dim = call.tensor(0), call.integer(1)
    if call.name not in SOFTMAXES or tensor is None or not tensor.strides or dim is None:
        return False
    place = dim % len(tensor.strides)
    large = tensor.dims[place] > 1 and tensor.dims[-1] > 1
    return place < len(tensor.dims) - 1 and tensor.strides[place] == 1 and large


def _is_gradient(call: OpCall, given: list[OpCall]) -> bool:
    tensor = call.tensor(0)
    if call.name not in GRADIENTS or tensor is None:
        return False
    return any(one.tensors[0] and one.tensors[0].dims == tensor.dims for one in given)


def _norms(case: Case) -> Finding | None:
    """Compare norms of transposed tensors with their bytes."""
    rows, card = case.rows, case.card
    if rows is None or card is None or not case.on_device:
        return None
    norms = rows.category("normalization", "reduction") & rows.called(_is_transposed)
    norms &= rows.work.bytes >= SMALL
    spent, least = rows.ms(norms), _least_ms(rows, norms, card)
    if not spent > SLOW * least:
        return None
    lines = np.unique(rows.work.line[norms & (rows.work.line > 0)])
    moved = rows.category("copy") & rows.called(_is_transposed) & np.isin(rows.work.line, lines)
    gain = spent - IN_ORDER * least + rows.ms(moved)
    if not gain > SHARE * case.step_ms:
        return None
    return Claim(
        rule="transposed_norm",
        claim=f"norms of transposed tensors take {units.milliseconds(spent)} a step",
        evidence=(
            f"{spent / least:.0f} times as long as their bytes",
            *_shapes(rows, norms),
            *_copies(rows, moved),
            *rows.hot_lines(norms | moved),
        ),
        remedy="norm(x.flatten(0, 1)).view_as(x) instead of norm(x.transpose(1, 2)).transpose(1, "
        "2): rows of channels give the same numbers; or keep the channels where the norm wants "
        "them",
        stake_ms=spent + rows.ms(moved),
        why="the kernels for such tensors read numbers that are far apart",
        gain_ms=gain,
        work=norms | moved,
    )


def _least_ms(rows: Rows, mask: Mask, card: Card) -> float:
    """Return what the least bytes of this work take; unknown ones count as none."""
    return float(np.nansum(rows.work.bytes[mask])) / rows.steps / card.bandwidth_gbs / 1e6


def _is_transposed(call: OpCall) -> bool:
    """Whether a tensor that a call reads lies in another order, an image in channels_last not."""
    for tensor in call.tensors[:2]:
        strides = tensor.strides if tensor is not None else None
        if tensor is None or not strides or 0 in strides or len(tensor.dims) < 3:
            continue
        order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
        order = [dim for dim in order if tensor.dims[dim] > 1]
        image = len(strides) > 3 and order == sorted(order, key=lambda dim: (dim == 1, dim))
        if order != sorted(order) and not image:
            return True
    return False


def _shapes(rows: Rows, norms: Mask) -> list[str]:
    """Return what the longest of these calls is given."""
    numbers, spent = rows.call[norms], rows.work.duration[norms]
    call = rows.calls[int(np.bincount(numbers, spent).argmax())]
    tensor = next(t for t in call.tensors if t is not None)
    shape, strides = ("x".join(map(str, dims)) for dims in (tensor.dims, tensor.strides or ()))
    return [f"{call.name} of {shape} in strides of {strides}"]


def _copies(rows: Rows, moved: Mask) -> list[str]:
    if not moved.any():
        return []
    spent = units.milliseconds(rows.ms(moved))
    return [f"{rows.count(moved):.3g} copies a step around them: {spent}"]


RULE = check
