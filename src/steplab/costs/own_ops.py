"""Least work of steplab's own kernels, by the arguments of the op that launches them.

Products inside these ops are operators of their own (aten::mm, aten::_grouped_mm) and counted
there. An op that launches several kernels has a model for each, for all its launches of one call.
"""

from __future__ import annotations

import functools
import re

from steplab.costs import op_flops
from steplab.costs.aten import Cost, Model, attention
from steplab.costs.op_call import OpCall, TensorArg, total_bytes

# T tokens, K chosen experts, E experts, R = T * K rows, D width, F inner width


INDEX = 4  # bytes of a row's number
NUMBER = 4  # bytes of a statistic of a row, in fp32


def _gather(call: OpCall, shift: int) -> Cost | None:
    """Tokens to rows; the backward moves the gradient so, and x again for a weight's gradient."""
    x_TD, source_R = call.tensor(shift), call.tensor(5 + shift)
    if not (x_TD and source_R):
        return None
    times = 2 if shift and call.truth(12) is not False else 1
    row = x_TD.dims[-1] * x_TD.item
    return Cost(0.0, times * (x_TD.bytes + source_R.bytes + source_R.numel * row))


def _add_up(call: OpCall, shift: int) -> Cost | None:
    """Rows to tokens."""
    x_TD, row_TK = call.tensor(shift), call.tensor(4 + shift)
    if not (x_TD and row_TK):
        return None
    return Cost(0.0, row_TK.bytes + row_TK.numel * x_TD.dims[-1] * x_TD.item + x_TD.bytes)


def _activation(rows: int, w_in: TensorArg, w_out: TensorArg, told: int, backward: bool) -> Cost:
    """z in, h out; the backward has dh and dz too. `told` are the bytes of the rows' weights."""
    wide = rows * (w_in.dims[-2] + w_out.dims[-1]) * w_in.item
    if backward:
        return Cost(0.0, 2 * wide + told + (NUMBER * rows if told else 0))
    return Cost(0.0, wide + told)


def _expert_activation(call: OpCall, shift: int) -> Cost | None:
    weights_TK, source_R = call.tensor(1 + shift), call.tensor(5 + shift)
    w_in_EFD, w_out_EDF = call.tensor(2 + shift), call.tensor(3 + shift)
    if not (weights_TK and source_R and w_in_EFD and w_out_EDF):
        return None
    told = total_bytes(weights_TK, source_R)
    return _activation(source_R.numel, w_in_EFD, w_out_EDF, told, bool(shift))


def _shared_activation(call: OpCall, shift: int) -> Cost | None:
    x_TD, w_in_FD, w_out_DF = (call.tensor(i + shift) for i in range(3))
    if not (x_TD and w_in_FD and w_out_DF):
        return None
    told = total_bytes(call.tensor(3 + shift))
    return _activation(x_TD.dims[0], w_in_FD, w_out_DF, told, bool(shift))


def _expert_segments(call: OpCall) -> Cost | None:
    """At least one part of every expert's weight gradient is read and written."""
    asked = [call.tensor(i) for i, flag in ((3, 12), (4, 13)) if call.truth(flag) is not False]
    return Cost(0.0, 2.0 * total_bytes(*asked)) if any(asked) else None


def _segments(call: OpCall) -> Cost | None:
    x_RK, dout_RN, offsets_E = (call.tensor(i) for i in range(3))
    if not (x_RK and dout_RN and offsets_E):
        return None
    return Cost(0.0, 2.0 * offsets_E.numel * x_RK.dims[-1] * dout_RN.dims[-1] * x_RK.item)


def _place(call: OpCall, written: int) -> Cost | None:
    """Experts of the assignments in; `written` numbers for each of them out."""
    experts_TK = call.tensor(0)
    return Cost(0.0, experts_TK.bytes + written * INDEX * experts_TK.numel) if experts_TK else None


_partial = functools.partial
# By op, then by kernel.
EXPERT_KERNELS: dict[str, dict[str, Model]] = {
    "fused_experts": {
        "gather_rows_kernel": _partial(_gather, shift=0),
        "activation_forward_kernel": _partial(_expert_activation, shift=0),
        "gather_sum_kernel": _partial(_add_up, shift=0),
    },
    "fused_experts_backward": {
        "gather_rows_kernel": _partial(_gather, shift=1),
        "activation_backward_kernel": _partial(_expert_activation, shift=1),
        "gather_sum_kernel": _partial(_add_up, shift=1),
        "add_segments_kernel": _expert_segments,
    },
    "fused_feed_forward": {"activation_forward_kernel": _partial(_shared_activation, shift=0)},
    "fused_feed_forward_backward": {
        "activation_backward_kernel": _partial(_shared_activation, shift=1)
    },
    "grouped_mm_aten_weight_gradient": {"add_segments_kernel": _segments},
    "place_assignments": {
        "routing_count_kernel": _partial(_place, written=0),
        "routing_place_kernel": _partial(_place, written=2),
    },
}


# B batch, T tokens, E experts, H heads, L steps of time, D width, V vocabulary


# Autograd's frame around an op's forward has the op's arguments, and is where kernels start.
_OP = re.compile(r"(?:steplab::|GeneratedBackwardFor_steplab_)(?P<name>\w+?)(?:_default)?")
_HALF_CODES = (5, 15)  # torch.float16 and torch.bfloat16 as recorded scalars


def own_op(name: str) -> str:
    """Return "rotary" of "steplab::rotary"; "" for an operator of somebody else's."""
    found = _OP.fullmatch(name)
    return found["name"] if found else ""


def has_many_kernels(name: str) -> bool:
    """Whether the kernels of an operator have models of their own."""
    return own_op(name) in EXPERT_KERNELS


def own_cost(call: OpCall, kernel: str) -> Cost | None:
    """Return what `call` costs; of an op with several kernels, what those of this name do."""
    name = own_op(call.name)
    model = EXPERT_KERNELS[name].get(kernel) if name in EXPERT_KERNELS else _SINGLE.get(name)
    return model(call) if model else None


def _router(call: OpCall) -> Cost | None:
    """One product with the weight and the gate; probabilities, choices and gates out."""
    x_TD, weight_ED, chosen = call.tensor(0), call.tensor(1), call.integer(3)
    if not (x_TD and weight_ED and chosen):
        return None
    (T, D), E = x_TD.dims, weight_ED.dims[0]
    out = T * (NUMBER * (E + chosen + 1) + 8 * chosen)
    flops = op_flops.matmul(T, E + 1, D)
    return Cost(flops, total_bytes(x_TD, weight_ED, call.tensor(2)) + out, x_TD.dtype)


def _router_backward(call: OpCall) -> Cost | None:
    x_TD, weight_ED = call.tensor(3), call.tensor(4)
    if not (x_TD and weight_ED):
        return None
    (T, D), E = x_TD.dims, weight_ED.dims[0]
    moved = total_bytes(*call.tensors) + x_TD.bytes + NUMBER * (E + 1) * D
    return Cost(2 * op_flops.matmul(T, E + 1, D), moved, x_TD.dtype)


def _norm(call: OpCall, adds: bool) -> Cost | None:
    """The stream in; the normed rows, one number each and, where it adds, the new stream out."""
    x, added = call.tensor(0), call.tensor(1) if adds else None
    weight_D = call.tensor(2 if adds else 1)
    if not (x and weight_D) or (adds and not added):
        return None
    stream = max(x.item, added.item) if added else x.item
    normed = 2 if call.integer(4 if adds else 3) in _HALF_CODES else stream
    written = x.numel * (normed + (stream if added else 0)) + NUMBER * x.numel // x.dims[-1]
    return Cost(0.0, total_bytes(x, added, weight_D) + written)


def _norm_backward(call: OpCall) -> Cost | None:
    stream, weight_D = call.tensor(2), call.tensor(3)
    if not (stream and weight_D):
        return None
    return Cost(0.0, total_bytes(*call.tensors) + stream.bytes + weight_D.bytes)


def _stream_norm(call: OpCall) -> Cost | None:
    """Stream and update in; the new stream, one number per row, and the norm or a score out."""
    x, added, weight_D = call.tensor(0), call.tensor(1), call.tensor(3)
    if not (x and weight_D):
        return None
    stream = max(x.item, added.item) if added else x.item
    rows = x.numel // x.dims[-1]
    written = NUMBER * rows + (x.numel * stream if added else 0)
    if call.tensor(5):  # scored: the norm of the chosen rows comes later
        written += NUMBER * rows
    else:
        written += x.numel * (2 if call.integer(7) in _HALF_CODES else stream)
    return Cost(0.0, total_bytes(*call.tensors) + written)


def _stream_rows(call: OpCall) -> Cost | None:
    """The chosen rows of the stream in, as many of the norm out."""
    stream, rows_BK = call.tensor(0), call.tensor(2)
    if not (stream and rows_BK):
        return None
    normed = 2 if call.integer(5) in _HALF_CODES else stream.item
    taken = rows_BK.numel * (stream.dims[-1] * (stream.item + normed) + NUMBER)
    return Cost(0.0, taken + total_bytes(rows_BK, call.tensor(3), call.tensor(4)))


def _stream_backward(call: OpCall) -> Cost | None:
    stream = call.tensor(4)
    if not stream:
        return None
    return Cost(0.0, total_bytes(*call.tensors) + stream.bytes + NUMBER * 3 * stream.dims[-1])


def _rotary(call: OpCall) -> Cost | None:
    """Two thirds of the product, q and k, in and out."""
    qkv = call.tensor(0)
    return (
        Cost(0.0, 4 * qkv.bytes // 3 + total_bytes(call.tensor(1), call.tensor(2))) if qkv else None
    )


def _rotary_backward(call: OpCall) -> Cost | None:
    gradients = [call.tensor(i) for i in range(3)]
    if not all(gradients):
        return None
    return Cost(0.0, 2 * total_bytes(*gradients) + total_bytes(call.tensor(3), call.tensor(4)))


def _logits(call: OpCall, x: int, times: int) -> Cost | None:
    """Logits of all tokens, `times` through memory; x, weight and targets stand side by side."""
    x_TD, weight_VD, targets_T = (call.tensor(x + i) for i in range(3))
    if not (x_TD and weight_VD and targets_T):
        return None
    moved = times * x_TD.dims[0] * weight_VD.dims[0] * x_TD.item
    return Cost(0.0, moved + targets_T.bytes)


def _mean_loss(call: OpCall) -> Cost | None:
    """The gradient is written over the logits, if anybody wants one."""
    needed = call.truth(4) is not False or call.truth(5) is not False
    return _logits(call, 0, 2 if needed else 1)


def _average(call: OpCall, x: int, times: int) -> Cost | None:
    """Along time: x in and y out; for the gradient x and dy in, dx out."""
    x_BLD = call.tensor(x)
    return Cost(0.0, float(times * x_BLD.bytes)) if x_BLD else None


_part = functools.partial
_LOSS = "triton_chunked_cross_entropy"
_SINGLE: dict[str, Model] = {
    "router": _router,
    "router_backward": _router_backward,
    "rms_norm": _part(_norm, adds=False),
    "add_rms_norm": _part(_norm, adds=True),
    "rms_norm_backward": _norm_backward,
    "stream_norm": _stream_norm,
    "stream_norm_rows": _stream_rows,
    "stream_norm_backward": _stream_backward,
    "rotary": _rotary,
    "rotary_backward": _rotary_backward,
    f"{_LOSS}_mean": _mean_loss,
    f"{_LOSS}_tokens": _part(_logits, x=0, times=1),
    f"{_LOSS}_tokens_backward": _part(_logits, x=1, times=2),
    "triton_flash_attention": attention(0, 3, documents=4),
    "triton_flash_attention_backward": attention(1, 6, documents=7),
    "ema_scan": _part(_average, x=0, times=2),
    "ema_scan_backward": _part(_average, x=2, times=3),
    "timestep_norm": _part(_average, x=0, times=2),
    "timestep_norm_backward": _part(_average, x=3, times=3),
}
