"""What steplab's own ops have to do at least, by the arguments of one call: the one table of it.

`flops` counts a whole call with the products inside it, as the FLOP counter needs it, which cannot
look into an op. `kernels` counts what the op's own kernels do, as the roofline of a trace needs it:
there the products inside are operators of their own (aten::mm, aten::_grouped_mm). An op that
launches several kernels has a cost for each of them, over all its launches in one call.

A new implementation needs no entry here. Its op is called steplab::<op>_<implementation>, takes the
arguments of the op it implements, in their order, and then has the costs of that op.
"""

# B batch, T tokens, K chosen experts, E experts, R = T * K rows, D width, F inner width, H heads
from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from steplab.costs import op_flops
from steplab.costs.aten import attention_cost
from steplab.costs.op_call import HALF_DTYPE_CODES, Cost, OpCall, TensorArg, total_bytes

INDEX = 4  # bytes of a row's number
NUMBER = 4  # bytes of a statistic of a row, in fp32

# Autograd's frame around an op's forward has the op's arguments, and is where kernels start.
_NAME = re.compile(r"(?:steplab::|GeneratedBackwardFor_steplab_)(?P<name>\w+?)(?:_default)?")


class Args:
    """The arguments of one call, by the names they have in the op's schema."""

    def __init__(self, names: tuple[str, ...], call: OpCall) -> None:
        self._position = {name: i for i, name in enumerate(names)}
        self._call = call
        self.is_backward = names[0].startswith("d")  # the gradient of the output comes first

    def __getitem__(self, name: str) -> TensorArg:
        """Return a tensor; LookupError where none was recorded, so that the call has no cost."""
        found = self.get(name)
        if found is None:
            raise LookupError(f"no tensor {name} in a call of {self._call.name}")
        return found

    def get(self, name: str) -> TensorArg | None:
        """Return a tensor that may be None."""
        return self._call.tensor(self._position[name])

    def integer(self, name: str) -> int:
        """Return a number; LookupError where none was recorded."""
        found = self._call.integer(self._position[name])
        if found is None:
            raise LookupError(f"no number {name} in a call of {self._call.name}")
        return found

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a list of numbers; LookupError where none was recorded."""
        found = self._call.integers(self._position[name])
        if found is None:
            raise LookupError(f"no numbers {name} in a call of {self._call.name}")
        return found

    def flag(self, name: str) -> bool:
        """Return a bool; LookupError where none was recorded."""
        found = self._call.truth(self._position[name])
        if found is None:
            raise LookupError(f"no flag {name} in a call of {self._call.name}")
        return found

    def needs(self, name: str) -> bool:
        """Whether a gradient is computed; it is unless the flag was recorded as False."""
        return self._call.truth(self._position[f"need_{name}"]) is not False

    def is_half(self, name: str) -> bool:
        """Whether a dtype was given and is a 16-bit one."""
        return self._call.integer(self._position[name]) in HALF_DTYPE_CODES

    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return total_bytes(*self._call.tensors)


KernelCost = Callable[[Args], Cost | None]


@dataclass(frozen=True)
class OwnOp:
    """One custom op: the names of its arguments, in order, and its costs."""

    args: str
    flops: Callable[[Args], float] | None  # None: unknown from the arguments
    kernels: KernelCost | Mapping[str, KernelCost] | None = None  # of each by name, where several

    def call_flops(self, call: OpCall) -> float | None:
        """Return the FLOPs of one call, with those of the products inside."""
        return self.flops(self._named(call)) if self.flops else None

    def kernel_cost(self, call: OpCall, kernel: str) -> Cost | None:
        """Return what the op's own kernels of this name do in one call; None: unknown."""
        cost = self.kernels.get(kernel) if isinstance(self.kernels, Mapping) else self.kernels
        try:
            return cost(self._named(call)) if cost else None
        except LookupError:
            return None

    def _named(self, call: OpCall) -> Args:
        return Args(tuple(self.args.split()), call)


def own_op_name(name: str) -> str:
    """Return "rotary" of "steplab::rotary"; "" for an operator of somebody else's."""
    found = _NAME.fullmatch(name)
    return found["name"] if found else ""


def find_own_op(name: str) -> OwnOp | None:
    """Return the op called `name` ("rotary", "rotary_backward"); None: its costs are unknown.

    "rms_norm_split_backward", which is not in the table, has the costs of "rms_norm_backward".
    """
    if name in OWN_OPS:
        return OWN_OPS[name]
    ending = next((end for end in _ENDINGS if name.endswith(end)), "")
    stem = name.removesuffix(ending)
    fits = [op for op in _IMPLEMENTED if stem.startswith(f"{op}_")]
    return OWN_OPS.get(_IMPLEMENTED[max(fits, key=len)] + ending) if fits else None


def has_several_kernels(name: str) -> bool:
    """Whether the kernels of an operator have costs of their own."""
    op = find_own_op(own_op_name(name))
    return op is not None and isinstance(op.kernels, Mapping)


def own_cost(call: OpCall, kernel: str) -> Cost | None:
    """Return what `call` costs; of an op with several kernels, what those of this name do."""
    op = find_own_op(own_op_name(call.name))
    return op.kernel_cost(call, kernel) if op else None


def _no_products(args: Args) -> float:
    return 0.0


# Experts and feed-forward: two products with what gathers, activates and adds up around them.


def _experts_flops(args: Args) -> float:
    """Each of the T x K rows is multiplied with both matrices of one expert."""
    w_in, w_out = (math.prod(args[name].dims[1:]) for name in ("w_in_EFD", "w_out_EDF"))
    return _two_products(args, args["weights_TK"].numel, w_in, w_out)


def _feed_forward_flops(args: Args) -> float:
    return _two_products(args, args["x_TD"].dims[0], args["w_in_FD"].numel, args["w_out_DF"].numel)


def _two_products(args: Args, rows: int, w_in: int, w_out: int) -> float:
    """The backward has dh always, and a product for each of dx, dw_in and dw_out that is needed."""
    if not args.is_backward:
        return 2.0 * rows * (w_in + w_out)
    dx, dw_in, dw_out = (args.needs(name) for name in ("dx", "dw_in", "dw_out"))
    return 2.0 * rows * ((dx + dw_in) * w_in + (1 + dw_out) * w_out)


def _gather_rows(args: Args) -> Cost:
    """Tokens to rows; the backward moves the gradient so, and x again for a weight's gradient."""
    x_TD, source_R = args["x_TD"], args["source_R"]
    times = 2 if args.is_backward and args.needs("dw_in") else 1
    row = x_TD.dims[-1] * x_TD.item
    return Cost(0.0, times * (x_TD.bytes + source_R.bytes + source_R.numel * row))


def _gather_sum(args: Args) -> Cost:
    """Rows to tokens."""
    x_TD, row_TK = args["x_TD"], args["row_TK"]
    return Cost(0.0, row_TK.bytes + row_TK.numel * x_TD.dims[-1] * x_TD.item + x_TD.bytes)


def _expert_activation(args: Args) -> Cost:
    weights = total_bytes(args["weights_TK"], args["source_R"])
    rows = args["source_R"].numel
    return _activation(args, rows, args["w_in_EFD"], args["w_out_EDF"], weights)


def _feed_forward_activation(args: Args) -> Cost:
    weights = total_bytes(args.get("weights_T1"))
    return _activation(args, args["x_TD"].dims[0], args["w_in_FD"], args["w_out_DF"], weights)


def _activation(args: Args, rows: int, w_in: TensorArg, w_out: TensorArg, weights: int) -> Cost:
    """z in, h out; the backward has dh and dz too. `weights` are the bytes of the rows' weights."""
    wide = rows * (w_in.dims[-2] + w_out.dims[-1]) * w_in.item
    if args.is_backward:
        return Cost(0.0, 2 * wide + weights + (NUMBER * rows if weights else 0))
    return Cost(0.0, wide + weights)


def _expert_product_inside(args: Args) -> Cost:
    rows = args["source_R"].numel
    return _product_inside(args, rows, args["w_in_EFD"], args["w_out_EDF"])


def _feed_forward_product_inside(args: Args) -> Cost:
    kept = args.is_backward and args.get("kept_TF") is not None
    return _product_inside(args, args["x_TD"].dims[0], args["w_in_FD"], args["w_out_DF"], kept)


def _product_inside(
    args: Args, rows: int, w_in: TensorArg, w_out: TensorArg, h_is_kept: bool = False
) -> Cost:
    """z and h out; the backward has z in, dz and (unless it is kept) h out, and stores no dh."""
    D, F = w_out.dims[-2:]
    z = w_in.dims[-2]  # 2F for swiglu
    w, wide = (w_out, 2 * z + (0 if h_is_kept else F)) if args.is_backward else (w_in, z + F)
    product = 2.0 * rows * D * (F if args.is_backward else z)
    return Cost(product, w.bytes + rows * (D + wide) * w.item)


def _expert_segments(args: Args) -> Cost | None:
    """At least one part of every expert's weight gradient is read and written."""
    pairs = (("dw_in", "w_in_EFD"), ("dw_out", "w_out_EDF"))
    needed = [args.get(weight) for gradient, weight in pairs if args.needs(gradient)]
    return Cost(0.0, 2.0 * total_bytes(*needed)) if any(needed) else None


def _counted_assignments(args: Args) -> Cost:
    return Cost(0.0, args["experts_TK"].bytes)


def _placed_assignments(args: Args) -> Cost:
    """Experts of the assignments in, two numbers for each of them out."""
    experts_TK = args["experts_TK"]
    return Cost(0.0, experts_TK.bytes + 2 * INDEX * experts_TK.numel)


def _ranked_rows(args: Args) -> Cost:
    """Scores in; the slot of every row, the rows taken and the lowest score out."""
    score_BS, taken = args["score_BS"], args.integer("taken")
    B = score_BS.dims[0]
    return Cost(0.0, score_BS.bytes + 8 * score_BS.numel + B * (8 * taken + score_BS.item))


# Rows of a table.


def _looked_up(args: Args) -> Cost:
    """Ids and their rows in, the rows times a number out."""
    ids_T, weight_VD = args["ids_T"], args["weight_VD"]
    return Cost(0.0, ids_T.bytes + 2 * ids_T.numel * weight_VD.dims[1] * weight_VD.item)


def _looked_up_sums(args: Args) -> Cost:
    """Gradients of the rows and their order in, that of the table out."""
    dout_TD = args["dout_TD"]
    (T, D), table = dout_TD.dims, args.integer("table")
    return Cost(0.0, 8 * T + 2 * INDEX * table + (T + table) * D * dout_TD.item)


# Grouped products.


def _grouped_flops(args: Args) -> float:
    return 2.0 * args["x_RK"].numel * args["w_EKN"].dims[-1]


def _grouped_gradient_flops(args: Args) -> float:
    """x^T dout of every group."""
    return 2.0 * args["x_RK"].numel * args["dout_RN"].dims[-1]


def _segments(args: Args) -> Cost:
    x_RK, dout_RN, groups = args["x_RK"], args["dout_RN"], args["offsets_E"].numel
    return Cost(0.0, 2.0 * groups * x_RK.dims[-1] * dout_RN.dims[-1] * x_RK.item)


# Router: one product with the weight and the gate.


def _router_flops(args: Args) -> float:
    times = 2 if args.is_backward else 1
    parameters = args["weight_ED"].numel + args["gate_1D"].numel
    return times * 2.0 * args["x_TD"].dims[0] * parameters


def _router(args: Args) -> Cost:
    """Probabilities, choices, their weights and gates out."""
    x_TD, weight_ED, gate_1D = (args[name] for name in ("x_TD", "weight_ED", "gate_1D"))
    T, E, chosen = x_TD.dims[0], weight_ED.dims[0], args.integer("chosen")
    out = T * (NUMBER * (E + chosen + 1) + 8 * chosen)
    return Cost(_router_flops(args), total_bytes(x_TD, weight_ED, gate_1D) + out, x_TD.dtype)


def _router_backward(args: Args) -> Cost:
    x_TD, (E, D) = args["x_TD"], args["weight_ED"].dims
    moved = args.total_bytes() + x_TD.bytes + NUMBER * (E + 1) * D
    return Cost(_router_flops(args), moved, x_TD.dtype)


# Norms and rotation: bounded by memory.


def _rms_norm(args: Args) -> Cost:
    """The stream in; the normed rows and one number each out."""
    x, weight_D = args["x"], args["weight_D"]
    normed = 2 if args.is_half("dtype") else x.item
    written = x.numel * normed + NUMBER * x.numel // x.dims[-1]
    return Cost(0.0, total_bytes(x, weight_D) + written)


def _add_rms_norm(args: Args) -> Cost:
    """The same with an update in and the new stream out."""
    x, added, weight_D = args["x"], args["added"], args["weight_D"]
    stream = max(x.item, added.item)
    normed = 2 if args.is_half("dtype") else stream
    written = x.numel * (normed + stream) + NUMBER * x.numel // x.dims[-1]
    return Cost(0.0, total_bytes(x, added, weight_D) + written)


def _rms_norm_backward(args: Args) -> Cost:
    return Cost(0.0, args.total_bytes() + args["stream"].bytes + args["weight_D"].bytes)


def _stream_norm(args: Args) -> Cost:
    """Stream and update in; the new stream, one number per row, and the norm or a score out."""
    x, added = args["x"], args.get("added")
    stream = max(x.item, added.item) if added else x.item
    rows = x.numel // x.dims[-1]
    written = NUMBER * rows + (x.numel * stream if added else 0)
    if args.get("router_D"):  # scored: the norm of the chosen rows comes later
        written += NUMBER * rows
    else:
        written += x.numel * (2 if args.is_half("dtype") else stream)
    return Cost(0.0, args.total_bytes() + written)


def _stream_norm_rows(args: Args) -> Cost:
    """The chosen rows of the stream in, as many of the norm out."""
    stream, rows = args["stream"], args["rows"]
    normed = 2 if args.is_half("dtype") else stream.item
    taken = rows.numel * (stream.dims[-1] * (stream.item + normed) + NUMBER)
    return Cost(0.0, taken + total_bytes(rows, args.get("weight_D"), args.get("offset_D")))


def _stream_norm_backward(args: Args) -> Cost:
    stream = args["stream"]
    return Cost(0.0, args.total_bytes() + stream.bytes + NUMBER * 3 * stream.dims[-1])


def _along_time(args: Args) -> Cost:
    """x in and y out; for the gradient x and dy in, dx out."""
    return Cost(0.0, float((3 if args.is_backward else 2) * args["x"].bytes))


def _rotary(args: Args) -> Cost:
    """Two thirds of the product, q and k, in and out."""
    moved = 4 * args["qkv_BT3HD"].bytes // 3
    return Cost(0.0, moved + total_bytes(args.get("cos"), args.get("sin")))


def _rotary_backward(args: Args) -> Cost:
    gradients = (args[name] for name in ("dq_BHTD", "dk_BHTD", "dv_BHTD"))
    return Cost(0.0, 2 * total_bytes(*gradients) + total_bytes(args.get("cos"), args.get("sin")))


# Head and loss.


def _head_flops(args: Args) -> float:
    return 2.0 * args["x"].dims[0] * args["weight"].numel


def _head_and_gradient_flops(args: Args) -> float:
    """The logits, and a product for each gradient that is needed."""
    return (1 + args.needs("dx") + args.needs("dw")) * _head_flops(args)


def _mean_loss(args: Args) -> Cost:
    """The gradient is written over the logits, if anybody wants one."""
    return _logits(args, 2 if args.needs("dx") or args.needs("dw") else 1)


def _token_losses(args: Args) -> Cost:
    return _logits(args, 1)


def _token_losses_backward(args: Args) -> Cost:
    return _logits(args, 2)


def _logits(args: Args, times: int) -> Cost:
    """Logits of all tokens, `times` through memory."""
    x, weight, targets = (args[name] for name in ("x", "weight", "targets"))
    return Cost(0.0, times * x.dims[0] * weight.dims[0] * x.item + targets.bytes)


# Attention.


def _attention(args: Args) -> Cost | None:
    """The lengths of documents are not recorded: with documents the cost is unknown."""
    if args.get("first"):
        return None
    q, k, v = args["q"], args["k"], args["v"]
    return attention_cost(q, k, v, args.flag("causal"), args.is_backward)


def _packed_attention(args: Args) -> Cost | None:
    """Of q, k and v only their places in `packed` are recorded: four sizes, then strides."""
    packed = args["packed"]
    q, k, v = (TensorArg(args.integers(name)[:4], packed.dtype) for name in "qkv")
    return attention_cost(q, k, v, args.flag("causal"), args.is_backward)


def _packed_attention_flops(args: Args) -> float:
    (B, H, T, D), S, d_v = args.integers("q")[:4], args.integers("k")[2], args.integers("v")[3]
    shape = (B * op_flops.attention_pairs(T, S, args.flag("causal")), H, D, d_v)
    if args.is_backward:
        return op_flops.attention_backward(*shape, recompute=True)
    return op_flops.attention_forward(*shape)


def _attention_by_blocks_flops(args: Args) -> float:
    """Scores and values over the pairs that are computed; the backward has twice the products."""
    (B, H, T, D), (S, d_v) = args["q"].dims, args["v"].dims[2:]
    pairs = op_flops.attention_block_pairs(T, S) if args.flag("causal") else float(T * S)
    return (2 if args.is_backward else 1) * op_flops.attention_forward(B * pairs, H, D, d_v)


_EXPERTS = "x_TD weights_TK w_in_EFD w_out_EDF row_TK source_R offsets_E"
_NEEDS = "need_dx need_dw_in need_dw_out"
_HEAD = "x weight targets"
_STREAM = "x added slots weight_D offset_D router_D eps dtype"

OWN_OPS = {
    "fused_experts": OwnOp(
        f"{_EXPERTS} activation matmul",
        flops=_experts_flops,
        kernels={
            "gather_rows_kernel": _gather_rows,
            "activation_forward_kernel": _expert_activation,
            "matmul_activation_kernel": _expert_product_inside,
            "gather_sum_kernel": _gather_sum,
        },
    ),
    "fused_experts_backward": OwnOp(
        f"dout_TD {_EXPERTS} z_RF activation matmul {_NEEDS}",
        flops=_experts_flops,
        kernels={
            "gather_rows_kernel": _gather_rows,
            "activation_backward_kernel": _expert_activation,
            "matmul_activation_kernel": _expert_product_inside,
            "gather_sum_kernel": _gather_sum,
            "add_segments_kernel": _expert_segments,
        },
    ),
    "fused_feed_forward": OwnOp(
        "x_TD w_in_FD w_out_DF weights_T1 activation keeps_h",
        flops=_feed_forward_flops,
        kernels={
            "activation_forward_kernel": _feed_forward_activation,
            "matmul_activation_kernel": _feed_forward_product_inside,
        },
    ),
    "fused_feed_forward_backward": OwnOp(
        f"dout_TD x_TD w_in_FD w_out_DF weights_T1 z_TF kept_TF activation {_NEEDS}",
        flops=_feed_forward_flops,
        kernels={
            "activation_backward_kernel": _feed_forward_activation,
            "matmul_activation_kernel": _feed_forward_product_inside,
        },
    ),
    "experts_fp8": OwnOp(_EXPERTS, flops=_experts_flops),
    "experts_fp8_backward": OwnOp(
        f"dout_TD {_EXPERTS} z_RF scales_3R {_NEEDS}", flops=_experts_flops
    ),
    "feed_forward_fp8": OwnOp("x_TD w_in_FD w_out_DF weights_T1", flops=_feed_forward_flops),
    "feed_forward_fp8_backward": OwnOp(
        f"dout_TD x_TD w_in_FD w_out_DF weights_T1 z_TF scales_3T {_NEEDS}",
        flops=_feed_forward_flops,
    ),
    "top_rows_triton_rank": OwnOp(
        "score_BS taken", flops=_no_products, kernels={"rank_rows_kernel": _ranked_rows}
    ),
    "embedding_triton_sorted": OwnOp(
        "weight_VD ids_T scale", flops=_no_products, kernels=_looked_up
    ),
    "embedding_triton_sorted_backward": OwnOp(
        "dout_TD ids_T scale table",
        flops=_no_products,
        kernels={"row_sums_kernel": _looked_up_sums},
    ),
    "place_assignments": OwnOp(
        "experts_TK experts",
        flops=_no_products,
        kernels={
            "routing_count_kernel": _counted_assignments,
            "routing_place_kernel": _placed_assignments,
        },
    ),
    "grouped_mm": OwnOp("x_RK w_EKN offsets_E", flops=_grouped_flops),
    "grouped_mm_weight_gradient": OwnOp(
        "x_RK dout_RN offsets_E",
        flops=_grouped_gradient_flops,
        kernels={"add_segments_kernel": _segments},
    ),
    "router": OwnOp("x_TD weight_ED gate_1D chosen", flops=_router_flops, kernels=_router),
    "router_backward": OwnOp(
        "dprobabilities_TE dweights_TK dgate_T1 x_TD weight_ED gate_1D",
        flops=_router_flops,
        kernels=_router_backward,
    ),
    "rms_norm": OwnOp("x weight_D eps dtype", flops=_no_products, kernels=_rms_norm),
    "rms_norm_backward": OwnOp(
        "d_normed d_stream stream weight_D rstd", flops=_no_products, kernels=_rms_norm_backward
    ),
    "add_rms_norm": OwnOp("x added weight_D eps dtype", flops=_no_products, kernels=_add_rms_norm),
    "layer_norm": OwnOp("x weight_D bias_D eps dtype", flops=_no_products, kernels=_rms_norm),
    "layer_norm_backward": OwnOp(
        "d_normed d_stream stream weight_D mean rstd has_bias",
        flops=_no_products,
        kernels=_rms_norm_backward,
    ),
    "add_layer_norm": OwnOp(
        "x added weight_D bias_D eps dtype", flops=_no_products, kernels=_add_rms_norm
    ),
    "stream_norm": OwnOp(_STREAM, flops=_no_products, kernels=_stream_norm),
    "stream_norm_rows": OwnOp(
        "stream rstd rows weight_D offset_D dtype", flops=_no_products, kernels=_stream_norm_rows
    ),
    "stream_norm_backward": OwnOp(
        "d_normed slots d_score d_stream stream rstd weight_D",
        flops=_no_products,
        kernels=_stream_norm_backward,
    ),
    "timestep_norm": OwnOp("x", flops=_no_products, kernels=_along_time),
    "timestep_norm_backward": OwnOp(
        "dy d_mean d_variance x", flops=_no_products, kernels=_along_time
    ),
    "ema_scan": OwnOp("x", flops=None, kernels=_along_time),
    "ema_scan_backward": OwnOp("dy dlast x", flops=None, kernels=_along_time),
    "rotary": OwnOp("qkv_BT3HD cos sin", flops=_no_products, kernels=_rotary),
    "rotary_backward": OwnOp(
        "dq_BHTD dk_BHTD dv_BHTD cos sin", flops=_no_products, kernels=_rotary_backward
    ),
    "triton_flash_attention": OwnOp("q k v causal first past", flops=None, kernels=_attention),
    "triton_flash_attention_backward": OwnOp(
        "d_out q k v out lse causal first past", flops=None, kernels=_attention
    ),
    "packed_attention": OwnOp(
        "packed q k v causal", flops=_packed_attention_flops, kernels=_packed_attention
    ),
    "packed_attention_backward": OwnOp(
        "d_out packed q k v out lse causal",
        flops=_packed_attention_flops,
        kernels=_packed_attention,
    ),
    "blocks_attention": OwnOp("q k v causal", flops=_attention_by_blocks_flops),
    "blocks_attention_backward": OwnOp(
        "d_out q k v weights causal", flops=_attention_by_blocks_flops
    ),
    "chunked_cross_entropy_mean": OwnOp(
        f"{_HEAD} ignore need_dx need_dw", flops=_head_and_gradient_flops
    ),
    "chunked_cross_entropy_tokens": OwnOp(_HEAD, flops=_head_flops),
    "chunked_cross_entropy_tokens_backward": OwnOp(
        f"d_losses {_HEAD} norms ignore need_dx need_dw", flops=_head_and_gradient_flops
    ),
    "triton_chunked_cross_entropy_mean": OwnOp(
        f"{_HEAD} ignore need_dx need_dw", flops=_head_and_gradient_flops, kernels=_mean_loss
    ),
    "triton_chunked_cross_entropy_tokens": OwnOp(_HEAD, flops=_head_flops, kernels=_token_losses),
    "triton_chunked_cross_entropy_tokens_backward": OwnOp(
        f"d_losses {_HEAD} norms ignore need_dx need_dw",
        flops=_head_and_gradient_flops,
        kernels=_token_losses_backward,
    ),
    "scaled": OwnOp("gradient factor", flops=_no_products),
    "kept_in_memory": OwnOp("table", flops=_no_products),
}
_ENDINGS = ("_tokens_backward", "_tokens", "_mean", "_weight_gradient", "_backward")
# Op by op what a new implementation shares its costs with: the folder in kernels/, an entry above.
_IMPLEMENTED = {
    "attention": "triton_flash_attention",
    "cross_entropy": "triton_chunked_cross_entropy",
    "ema": "ema_scan",
    "experts": "fused_experts",
    "feed_forward": "fused_feed_forward",
    "grouped_mm": "grouped_mm",
    "layer_norm": "layer_norm",
    "rms_norm": "rms_norm",
    "rotary": "rotary",
    "router": "router",
    "stream_norm": "stream_norm",
    "timestep_norm": "timestep_norm",
}
