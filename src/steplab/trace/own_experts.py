"""Least traffic of the kernels around the products of a mixture's experts.

Arguments of the ops by position; a backward has its gradient in front, so all stand one further.
"""

# T tokens, K chosen experts, E experts, R = T * K rows, D width, F inner width
from __future__ import annotations

import functools

from steplab.trace.products import Cost, Model
from steplab.trace.shapes import Call, Tensor, total_bytes

INDEX = 4  # bytes of a row's number
NUMBER = 4  # bytes of a statistic of a row, in fp32


def _gather(call: Call, shift: int) -> Cost | None:
    """Tokens to rows; the backward moves the gradient so, and x again for a weight's gradient."""
    x_TD, source_R = call.tensor(shift), call.tensor(5 + shift)
    if not (x_TD and source_R):
        return None
    times = 2 if shift and call.truth(12) is not False else 1
    row = x_TD.dims[-1] * x_TD.item
    return Cost(0.0, times * (x_TD.bytes + source_R.bytes + source_R.numel * row))


def _add_up(call: Call, shift: int) -> Cost | None:
    """Rows to tokens."""
    x_TD, row_TK = call.tensor(shift), call.tensor(4 + shift)
    if not (x_TD and row_TK):
        return None
    return Cost(0.0, row_TK.bytes + row_TK.numel * x_TD.dims[-1] * x_TD.item + x_TD.bytes)


def _activation(rows: int, w_in: Tensor, w_out: Tensor, told: int, backward: bool) -> Cost:
    """z in, h out; the backward has dh and dz too. `told` are the bytes of the rows' weights."""
    wide = rows * (w_in.dims[-2] + w_out.dims[-1]) * w_in.item
    if backward:
        return Cost(0.0, 2 * wide + told + (NUMBER * rows if told else 0))
    return Cost(0.0, wide + told)


def _expert_activation(call: Call, shift: int) -> Cost | None:
    weights_TK, source_R = call.tensor(1 + shift), call.tensor(5 + shift)
    w_in_EFD, w_out_EDF = call.tensor(2 + shift), call.tensor(3 + shift)
    if not (weights_TK and source_R and w_in_EFD and w_out_EDF):
        return None
    told = total_bytes(weights_TK, source_R)
    return _activation(source_R.numel, w_in_EFD, w_out_EDF, told, bool(shift))


def _shared_activation(call: Call, shift: int) -> Cost | None:
    x_TD, w_in_FD, w_out_DF = (call.tensor(i + shift) for i in range(3))
    if not (x_TD and w_in_FD and w_out_DF):
        return None
    told = total_bytes(call.tensor(3 + shift))
    return _activation(x_TD.dims[0], w_in_FD, w_out_DF, told, bool(shift))


def _expert_segments(call: Call) -> Cost | None:
    """At least one part of every expert's weight gradient is read and written."""
    asked = [call.tensor(i) for i, flag in ((3, 12), (4, 13)) if call.truth(flag) is not False]
    return Cost(0.0, 2.0 * total_bytes(*asked)) if any(asked) else None


def _segments(call: Call) -> Cost | None:
    x_RK, dout_RN, offsets_E = (call.tensor(i) for i in range(3))
    if not (x_RK and dout_RN and offsets_E):
        return None
    return Cost(0.0, 2.0 * offsets_E.numel * x_RK.dims[-1] * dout_RN.dims[-1] * x_RK.item)


def _place(call: Call, written: int) -> Cost | None:
    """Experts of the assignments in; `written` numbers for each of them out."""
    experts_TK = call.tensor(0)
    return Cost(0.0, experts_TK.bytes + written * INDEX * experts_TK.numel) if experts_TK else None


_part = functools.partial
# By op, then by kernel.
EXPERT_KERNELS: dict[str, dict[str, Model]] = {
    "fused_experts": {
        "gather_rows_kernel": _part(_gather, shift=0),
        "activation_forward_kernel": _part(_expert_activation, shift=0),
        "gather_sum_kernel": _part(_add_up, shift=0),
    },
    "fused_experts_backward": {
        "gather_rows_kernel": _part(_gather, shift=1),
        "activation_backward_kernel": _part(_expert_activation, shift=1),
        "gather_sum_kernel": _part(_add_up, shift=1),
        "add_segments_kernel": _expert_segments,
    },
    "fused_feed_forward": {"activation_forward_kernel": _part(_shared_activation, shift=0)},
    "fused_feed_forward_backward": {
        "activation_backward_kernel": _part(_shared_activation, shift=1)
    },
    "grouped_mm_aten_weight_gradient": {"add_segments_kernel": _segments},
    "place_assignments": {
        "routing_count_kernel": _part(_place, written=0),
        "routing_place_kernel": _part(_place, written=2),
    },
}
