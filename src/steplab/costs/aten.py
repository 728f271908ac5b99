"""FLOPs and least bytes of one call of an ATen operator or of a kernel that Inductor wrote.

Products, convolutions and attention are bounded by matrix units; everything else by memory,
where each operand is read once and each result written once.
"""

from __future__ import annotations

import math
import re

from steplab.costs import op_flops
from steplab.costs.op_call import (
    HALF_DTYPE_CODES,
    Cost,
    CostModel,
    Dims,
    OpCall,
    TensorArg,
    broadcast,
    item_bytes_of_kernel,
    total_bytes,
)


def aten_cost(call: OpCall, kernel: str) -> Cost | None:
    """Return the cost of a call whose longest kernel is `kernel`; None: unknown."""
    if call.name.startswith("triton_"):
        return _inductor_kernel(call)
    if any(call.lists):
        return _tensor_lists(call, kernel)
    model = MATRIX_COSTS.get(call.name.rstrip("_"))
    if model is None and call.name.startswith("aten::"):
        model = MEMORY_COSTS.get(_bare_name(call))
    return model(call) if model else None


# Matrix products, convolutions and attention.


def _product(a: TensorArg, b: TensorArg, added: TensorArg | None = None) -> Cost:
    """(..., M, K) x (..., K, N), or a vector on either side."""
    a_dims = a.dims if len(a.dims) > 1 else (1, *a.dims)
    b_dims = b.dims if len(b.dims) > 1 else (*b.dims, 1)
    batch = math.prod(broadcast(a_dims[:-2], b_dims[:-2]))
    M, K, N = a_dims[-2], a_dims[-1], b_dims[-1]
    moved = a.bytes + b.bytes + batch * M * N * a.item + (added.bytes if added else 0)
    return Cost(batch * op_flops.matmul(M, N, K), moved, a.dtype, is_matmul=True)


def _plain(call: OpCall) -> Cost | None:
    a, b = call.tensor(0), call.tensor(1)
    return _product(a, b) if a and b and a.dims and b.dims else None


def _added(call: OpCall) -> Cost | None:
    """added * beta + a x b; with beta = 0 the first tensor is not read."""
    added, a, b = call.tensor(0), call.tensor(1), call.tensor(2)
    if not (added and a and b):
        return None
    beta_is_0 = len(call.values) > 3 and call.values[3] in ("0", "0.")
    return _product(a, b, None if beta_is_0 else added)


def _linear(call: OpCall) -> Cost | None:
    x, weight_NK = call.tensor(0), call.tensor(1)
    if not (x and weight_NK and len(weight_NK.dims) == 2 and x.dims):
        return None
    rows = TensorArg((x.numel // max(x.dims[-1], 1), x.dims[-1]), x.dtype)
    return _product(rows, TensorArg(weight_NK.dims[::-1], weight_NK.dtype), call.tensor(2))


def _grouped(call: OpCall) -> Cost | None:
    """(M, K) x (E, K, N) by rows, (E, M, K) x (K, N) by columns, (M, K) x (K, N) cut along K."""
    a, b, ends = call.tensor(0), call.tensor(1), call.tensor(2)
    if not (a and b):
        return None
    M, K, N = a.dims[-2], a.dims[-1], b.dims[-1]
    matrices = 1
    if len(a.dims) == len(b.dims):
        matrices = a.dims[0] if len(a.dims) == 3 else ends.numel if ends else 1
    products = matrices if len(a.dims) == len(b.dims) == 3 else 1
    moved = a.bytes + b.bytes + matrices * M * N * a.item
    return Cost(products * op_flops.matmul(M, N, K), moved, a.dtype, is_matmul=True)


def _convolution(stride: int, padding: int, dilation: int, transposed: int = -1) -> CostModel:
    """Return the model of a forward convolution; the numbers are positions of its arguments."""

    def model(call: OpCall) -> Cost | None:
        x, weight = call.tensor(0), call.tensor(1)
        steps, pads = call.integers(stride), call.integers(padding)
        spread = call.integers(dilation)
        if not (x and weight and steps and pads and spread):
            return None
        if transposed >= 0 and call.truth(transposed) is not False:
            return None
        size = _window_positions(x.dims[2:], weight.dims[2:], steps, pads, spread)
        flops = _convolution_flops((x.dims[0], weight.dims[0], *size), weight)
        moved = x.bytes + weight.bytes + x.dims[0] * weight.dims[0] * math.prod(size) * x.item
        return Cost(flops, moved, x.dtype, is_matmul=True)

    return model


def _window_positions(
    size: Dims, window: Dims, stride: Dims, padding: Dims, dilation: Dims
) -> Dims:
    """Return the number of positions of a window along each dimension."""
    settings = (_full(values, size) for values in (stride, padding, dilation))
    each = zip(size, window, *settings, strict=True)
    return tuple((n + 2 * pad - d * (w - 1) - 1) // step + 1 for n, w, step, pad, d in each)


def _full(values: Dims, like: Dims) -> Dims:
    """Repeat a single value for all dimensions."""
    return values * len(like) if len(values) == 1 else values


def _convolution_flops(out_BC: Dims, weight: TensorArg) -> float:
    """Every output element multiplies one filter: (channels of the group) x (window)."""
    return op_flops.matmul(math.prod(out_BC), 1, math.prod(weight.dims[1:]))


def _convolution_backward(call: OpCall) -> Cost | None:
    """One product for each gradient that is needed: of the input, of the weight."""
    grad, x, weight = call.tensor(0), call.tensor(1), call.tensor(2)
    asked = call.truths(10)
    if not (grad and x and weight and asked) or call.truth(7) is None:
        return None
    # A transposed convolution is the gradient of a plain one: its input plays the output.
    out = x if call.truth(7) else grad
    moved = grad.bytes + x.bytes + weight.bytes + asked[0] * x.bytes + asked[1] * weight.bytes
    flops = (asked[0] + asked[1]) * _convolution_flops(out.dims, weight)
    return Cost(flops, moved, x.dtype, is_matmul=True)


def _attention(query: int, causal: int, heads_first: bool = True) -> CostModel:
    """Return the model of fused attention; a gradient op has its query after `grad_out`.

    `causal` is the position of a bool, or of a mask type whose 0 means none.
    """

    def model(call: OpCall) -> Cost | None:
        q, k, v = (call.tensor(query + i) for i in range(3))
        mask = call.truth(causal) if call.integer(causal) is None else call.integer(causal) != 0
        if not (q and k and v) or mask is None:
            return None
        return attention_cost(q, k, v, mask, backward=query == 1, heads_first=heads_first)

    return model


def attention_cost(
    q: TensorArg,
    k: TensorArg,
    v: TensorArg,
    causal: bool,
    backward: bool,
    heads_first: bool = True,
) -> Cost | None:
    """Return the cost of fused attention on (B, H, T, D), or (B, T, H, D) unless `heads_first`.

    The lengths of ragged batches (three dimensions) are not recorded: None.
    """
    if len(q.dims) != 4:
        return None
    B, H, T, D = q.dims if heads_first else (q.dims[0], q.dims[2], q.dims[1], q.dims[3])
    S, d_v = k.dims[2 if heads_first else 1], v.dims[3]
    shape = (B * op_flops.attention_pairs(T, S, causal), H, D, d_v)
    moved = q.bytes + k.bytes + v.bytes + B * H * T * d_v * q.item
    if backward:
        return Cost(op_flops.attention_backward(*shape, recompute=True), 2 * moved, q.dtype)
    return Cost(op_flops.attention_forward(*shape), moved, q.dtype)


_SDPA = "aten::_scaled_dot_product"
MATRIX_COSTS: dict[str, CostModel] = {
    **{f"aten::{name}": _plain for name in ("mm", "bmm", "matmul", "mv", "dot", "_scaled_mm")},
    **{f"aten::{name}": _added for name in ("addmm", "baddbmm", "_addmm_activation", "addmv")},
    "aten::linear": _linear,
    "mkldnn::_linear_pointwise": _linear,
    "aten::_grouped_mm": _grouped,
    "aten::convolution": _convolution(3, 4, 5, transposed=6),
    "aten::_convolution": _convolution(3, 4, 5, transposed=6),
    "aten::cudnn_convolution": _convolution(3, 2, 4),
    "aten::mkldnn_convolution": _convolution(4, 3, 5),
    "aten::miopen_convolution": _convolution(4, 3, 5),
    "aten::_conv_depthwise2d": _convolution(4, 5, 6),
    "aten::convolution_backward": _convolution_backward,
    f"{_SDPA}_flash_attention": _attention(0, 4),
    f"{_SDPA}_flash_attention_for_cpu": _attention(0, 4),
    f"{_SDPA}_efficient_attention": _attention(0, 6),
    f"{_SDPA}_cudnn_attention": _attention(0, 6),
    "aten::_flash_attention_forward": _attention(0, 8, heads_first=False),
    "aten::_efficient_attention_forward": _attention(0, 9, heads_first=False),
    "aten::_cudnn_attention_forward": _attention(0, 10),
    f"{_SDPA}_flash_attention_backward": _attention(1, 11),
    f"{_SDPA}_flash_attention_for_cpu_backward": _attention(1, 7),
    f"{_SDPA}_efficient_attention_backward": _attention(1, 11),
    f"{_SDPA}_cudnn_attention_backward": _attention(1, 14),
    "aten::_flash_attention_backward": _attention(1, 11, heads_first=False),
    "aten::_efficient_attention_backward": _attention(1, 14, heads_first=False),
    "aten::_cudnn_attention_backward": _attention(1, 14),
}


# Everything else is bounded by memory.

# Number of operands of elementwise ops; what follows them is a scalar or the `out` tensor.
_UNARY = """abs neg exp exp2 log log2 log1p expm1 sqrt rsqrt reciprocal square sigmoid tanh relu
silu gelu mish elu selu leaky_relu hardtanh hardswish hardsigmoid softplus log_sigmoid_forward cos
sin erf clamp clamp_min clamp_max round floor ceil sign logical_not bitwise_not isnan isinf tril
triu cumsum cumprod flip roll""".split()
_BINARY = """add sub rsub mul div pow fmod remainder floor_divide maximum minimum fmax fmin atan2
eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor masked_fill
mse_loss huber_loss smooth_l1_loss threshold_backward gelu_backward silu_backward sigmoid_backward
tanh_backward softplus_backward hardtanh_backward hardswish_backward leaky_relu_backward
elu_backward native_dropout_backward log_sigmoid_backward""".split()
_TERNARY = """where lerp addcmul addcdiv mse_loss_backward huber_loss_backward
smooth_l1_loss_backward""".split()
_OPERANDS = {
    **dict.fromkeys(_UNARY, 1),
    **dict.fromkeys(_BINARY, 2),
    **dict.fromkeys(_TERNARY, 3),
}
_TRUTHS = frozenset(
    "eq ne lt le gt ge logical_and logical_or logical_xor logical_not isnan isinf".split()
)
# Results are much smaller than what is read, and left out.
_REDUCTIONS = """sum mean prod amax amin max min argmax argmin any all norm linalg_vector_norm var
std var_mean nansum count_nonzero topk""".split()
_FILLS = "fill zero normal uniform bernoulli random exponential".split()
# Positions of the tensors that are read, and of the one with the size of the result.
_ROWWISE = {
    "_softmax": ((0,), 0),
    "_log_softmax": ((0,), 0),
    "native_layer_norm": ((0, 2, 3), 0),
    "native_layer_norm_backward": ((0, 1, 3, 4, 5), 1),
    "_fused_rms_norm": ((0, 2), 0),
    "_fused_rms_norm_backward": ((0, 1, 3, 4), 1),
    "native_group_norm": ((0, 1, 2), 0),
    "native_group_norm_backward": ((0, 1, 2, 3, 4), 1),
    "native_batch_norm": ((0, 1, 2), 0),
    "cudnn_batch_norm": ((0, 1, 2), 0),
    "miopen_batch_norm": ((0, 1, 2), 0),
    "native_batch_norm_backward": ((0, 1, 2), 1),
    "cudnn_batch_norm_backward": ((0, 1, 2), 0),
    "miopen_batch_norm_backward": ((0, 1, 2), 0),
}
# Positions of the lists that an optimizer reads, and of those it writes.
_OPTIMIZERS = {
    "_fused_adam_": ((0, 1, 2, 3, 4), (0, 2, 3, 4)),
    "_fused_adamw_": ((0, 1, 2, 3, 4), (0, 2, 3, 4)),
    "_fused_sgd_": ((0, 1, 2), (0, 2)),
    "_fused_adagrad_": ((0, 1, 2), (0, 2)),
}


def _elementwise(call: OpCall) -> Cost | None:
    """Operands broadcast to one shape; the result has it too, or is the first operand, in place."""
    name = _bare_name(call)
    operands = [t for i in range(_OPERANDS[name]) if (t := call.tensor(i))]
    if not operands:
        return None
    if call.name.endswith("_"):
        return Cost(0.0, total_bytes(*operands) + operands[0].bytes)
    # A tensor without dimensions does not widen the dtype of the result.
    typed = operands[1:] if name == "where" and len(operands) > 1 else operands
    item = max(t.item for t in ([t for t in typed if t.dims] or typed))
    size = math.prod(broadcast(*(t.dims for t in operands)))
    return Cost(0.0, total_bytes(*operands) + size * (1 if name in _TRUTHS else item))


def _copy(call: OpCall) -> Cost | None:
    target, source = call.tensor(0), call.tensor(1)
    return Cost(0.0, total_bytes(target, source)) if target and source else None


def _reading(call: OpCall) -> Cost | None:
    x = call.tensor(0)
    return Cost(0.0, x.bytes) if x else None


def _rowwise(call: OpCall) -> Cost | None:
    read, like = _ROWWISE[_bare_name(call)]
    result = call.tensor(like)
    return Cost(0.0, total_bytes(*map(call.tensor, read)) + result.bytes) if result else None


def _softmax_backward(call: OpCall) -> Cost | None:
    grad, out = call.tensor(0), call.tensor(1)
    if not (grad and out):
        return None
    item = 2 if call.integer(3) in HALF_DTYPE_CODES else out.item
    return Cost(0.0, grad.bytes + out.bytes + out.numel * item)


def _dropout(call: OpCall) -> Cost | None:
    x = call.tensor(0)
    return Cost(0.0, 2 * x.bytes + x.numel) if x else None  # one byte per element for the mask


def _sort(call: OpCall) -> Cost | None:
    x = next((t for t in call.tensors if t), None)
    return Cost(0.0, 2 * x.bytes + 8 * x.numel) if x else None


def _selected(table: int, index: int) -> CostModel:
    """Rows of a table, read and written once; `table` and `index` are positions of arguments."""

    def model(call: OpCall) -> Cost | None:
        rows, chosen = call.tensor(table), call.tensor(index)
        if not (rows and chosen and rows.dims):
            return None
        dim = call.integer(1) or 0 if index == 2 else 0
        row = rows.numel // max(rows.dims[dim], 1) * rows.item
        return Cost(0.0, chosen.bytes + 2 * chosen.numel * row)

    return model


def _moved(index: int, source: int, times: int) -> CostModel:
    """Elements selected by an index, each moved `times`: as many as the tensor at `source` has."""

    def model(call: OpCall) -> Cost | None:
        chosen, moved = call.tensor(index), call.tensor(source)
        self_ = call.tensor(0)
        if not (chosen and moved and self_):
            return None
        return Cost(0.0, chosen.bytes + times * moved.numel * self_.item)

    return model


def _picked(scores: int, target: int) -> CostModel:
    """One score per target, read or written."""

    def model(call: OpCall) -> Cost | None:
        values, labels = call.tensor(scores), call.tensor(target)
        if not (values and labels):
            return None
        return Cost(0.0, labels.bytes + labels.numel * values.item)

    return model


def _bare_name(call: OpCall) -> str:
    """Return "add" of "aten::add_"."""
    return call.name.removeprefix("aten::").rstrip("_")


MEMORY_COSTS: dict[str, CostModel] = {
    **dict.fromkeys(_OPERANDS, _elementwise),
    **dict.fromkeys(_REDUCTIONS, _reading),
    **dict.fromkeys(_FILLS, _reading),
    **dict.fromkeys(_ROWWISE, _rowwise),
    "copy": _copy,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _softmax_backward,
    "native_dropout": _dropout,
    "sort": _sort,
    "embedding": _selected(0, 1),
    "index_select": _selected(0, 2),
    "embedding_dense_backward": _copy,  # reads the gradient and the indices
    "gather": _moved(2, 2, 2),
    "scatter": _moved(2, 2, 2),
    "scatter_add": _moved(2, 2, 3),
    "index_add": _moved(2, 3, 3),
    "nll_loss_forward": _picked(0, 1),
    "nll_loss_backward": _picked(1, 2),
}


# Lists of tensors, and kernels that Inductor wrote.


def _tensor_lists(call: OpCall, kernel: str) -> Cost | None:
    """Ops over lists (optimizers, _foreach_*, cat); the name of the kernel has the element type.

    An op in place reads all lists and writes the first; any other writes a new list like it.
    """
    item = item_bytes_of_kernel(kernel)
    counts = [sum(map(math.prod, sizes)) for sizes in call.lists]
    if item is None or not any(counts):
        return None
    bare = call.name.removeprefix("aten::")
    read = written = counts[0]
    if bare in _OPTIMIZERS:
        reads, writes = _OPTIMIZERS[bare]
        read, written = sum(counts[i] for i in reads), sum(counts[i] for i in writes)
    elif bare in ("_foreach_norm", "_foreach_max"):
        written = 0
    elif bare == "_foreach_zero_":
        read = 0
    elif bare == "_foreach_copy_":
        read = counts[1]
    elif bare != "cat":
        read = sum(counts)
    return Cost(0.0, float(item * (read + written)))


def _inductor_kernel(call: OpCall) -> Cost | None:
    """An Inductor kernel: each argument once, but no more elements of it than the loop has steps.

    The scalars after the tensors are the lengths of the loop, so a lookup table counts as what one
    lookup per step can reach. A buffer that is read and written counts once.
    """
    tensors = [tensor for tensor in call.tensors if tensor]
    if call.name.startswith("triton_tem_"):
        return _inductor_product(call, tensors)
    lengths = [n for i in range(len(call.tensors)) if (n := call.integer(i)) and n > 0]
    steps = math.prod(lengths) if lengths else math.inf
    return Cost(0.0, float(sum(min(t.bytes, steps * t.item) for t in tensors)))


def _inductor_product(call: OpCall, tensors: list[TensorArg]) -> Cost | None:
    """A product alone in its template: the sizes (M K), (K N) and (M N) multiply to (M K N)^2."""
    if not re.search(r"_fused_mm_\d+$", call.name) or len(tensors) != 3:
        return None
    multiply_adds = math.sqrt(math.prod(tensor.numel for tensor in tensors))
    return Cost(2.0 * multiply_adds, float(total_bytes(*tensors)), tensors[0].dtype, is_matmul=True)
