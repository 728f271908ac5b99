"""Least traffic of the calls that memory bounds: each operand read once, each result written."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from steplab.trace.products import Cost, Model
from steplab.trace.shapes import Call, Tensor, broadcast, item_bytes_of_kernel

# Operands of elementwise ops, by position; what follows them is a scalar or the `out` tensor.
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
OPERANDS = {
    **dict.fromkeys(_UNARY, 1),
    **dict.fromkeys(_BINARY, 2),
    **dict.fromkeys(_TERNARY, 3),
}
_TRUTHS = frozenset(
    "eq ne lt le gt ge logical_and logical_or logical_xor logical_not isnan isinf".split()
)
# Results are smaller than what is read and left out.
_REDUCTIONS = """sum mean prod amax amin max min argmax argmin any all norm linalg_vector_norm var
std var_mean nansum count_nonzero topk""".split()
_FILLS = "fill zero normal uniform bernoulli random exponential".split()
# Positions of the tensors that are read, and of the one that the result looks like.
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
# Lists that an optimizer reads, and those it writes.
_OPTIMIZERS = {
    "_fused_adam_": ((0, 1, 2, 3, 4), (0, 2, 3, 4)),
    "_fused_adamw_": ((0, 1, 2, 3, 4), (0, 2, 3, 4)),
    "_fused_sgd_": ((0, 1, 2), (0, 2)),
    "_fused_adagrad_": ((0, 1, 2), (0, 2)),
}
_HALF_CODES = (5, 15)  # torch.float16 and torch.bfloat16 as recorded scalars


def _total(tensors: Iterable[Tensor | None]) -> int:
    return sum(tensor.bytes for tensor in tensors if tensor)


def elementwise(call: Call) -> Cost | None:
    """Operands stretch to one size; the result has it too, or is the first one, in place."""
    name = bare_name(call)
    operands = [t for i in range(OPERANDS[name]) if (t := call.tensor(i))]
    if not operands:
        return None
    if call.name.endswith("_"):
        return Cost(0.0, _total(operands) + operands[0].bytes)
    # A tensor without dimensions does not widen the result's dtype.
    typed = operands[1:] if name == "where" and len(operands) > 1 else operands
    item = max(t.item for t in ([t for t in typed if t.dims] or typed))
    size = math.prod(broadcast(*(t.dims for t in operands)))
    return Cost(0.0, _total(operands) + size * (1 if name in _TRUTHS else item))


def _copy(call: Call) -> Cost | None:
    target, source = call.tensor(0), call.tensor(1)
    return Cost(0.0, _total((target, source))) if target and source else None


def _reading(call: Call) -> Cost | None:
    x = call.tensor(0)
    return Cost(0.0, x.bytes) if x else None


def _rowwise(call: Call) -> Cost | None:
    read, like = _ROWWISE[bare_name(call)]
    result = call.tensor(like)
    return Cost(0.0, _total(map(call.tensor, read)) + result.bytes) if result else None


def _softmax_backward(call: Call) -> Cost | None:
    grad, out = call.tensor(0), call.tensor(1)
    if not (grad and out):
        return None
    item = 2 if call.integer(3) in _HALF_CODES else out.item
    return Cost(0.0, grad.bytes + out.bytes + out.numel * item)


def _dropout(call: Call) -> Cost | None:
    x = call.tensor(0)
    return Cost(0.0, 2 * x.bytes + x.numel) if x else None  # one byte per element for the mask


def _sort(call: Call) -> Cost | None:
    x = next((t for t in call.tensors if t), None)
    return Cost(0.0, 2 * x.bytes + 8 * x.numel) if x else None


def _selected(table: int, index: int) -> Model:
    """Rows of a table, read and written once; `table`, `index` are positions."""

    def model(call: Call) -> Cost | None:
        rows, chosen = call.tensor(table), call.tensor(index)
        if not (rows and chosen and rows.dims):
            return None
        dim = call.integer(1) or 0 if index == 2 else 0
        row = rows.numel // max(rows.dims[dim], 1) * rows.item
        return Cost(0.0, chosen.bytes + 2 * chosen.numel * row)

    return model


def _moved(index: int, source: int, times: int) -> Model:
    """Elements named by an index, each moved `times`: as many as the tensor at `source` has."""

    def model(call: Call) -> Cost | None:
        chosen, moved = call.tensor(index), call.tensor(source)
        self_ = call.tensor(0)
        if not (chosen and moved and self_):
            return None
        return Cost(0.0, chosen.bytes + times * moved.numel * self_.item)

    return model


def _picked(scores: int, target: int) -> Model:
    """One score per target, read or written."""

    def model(call: Call) -> Cost | None:
        values, labels = call.tensor(scores), call.tensor(target)
        if not (values and labels):
            return None
        return Cost(0.0, labels.bytes + labels.numel * values.item)

    return model


def bare_name(call: Call) -> str:
    """Return "add" of "aten::add_"."""
    return call.name.removeprefix("aten::").rstrip("_")


def tensor_lists(call: Call, kernel: str) -> Cost | None:
    """Ops over lists (optimizers, _foreach_*, cat); the kernel's name tells the size of elements.

    An op in place reads all lists and writes the first; any other writes a new one like it.
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


def triton(call: Call) -> Cost | None:
    """A kernel of Inductor: each argument once, and no more of it than the loop has steps.

    The scalars behind the tensors are the loop's lengths, so a table that is only looked up in
    counts as what one lookup per step can reach. A buffer that is read and written counts once.
    """
    tensors = [tensor for tensor in call.tensors if tensor]
    if call.name.startswith("triton_tem_"):
        return _triton_product(call, tensors)
    lengths = [n for i in range(len(call.tensors)) if (n := call.integer(i)) and n > 0]
    steps = math.prod(lengths) if lengths else math.inf
    return Cost(0.0, float(sum(min(t.bytes, steps * t.item) for t in tensors)))


def _triton_product(call: Call, tensors: list[Tensor]) -> Cost | None:
    """A product alone in its template: (M, K), (K, N) and (M, N) multiply to (M K N) squared."""
    if not re.search(r"_fused_mm_\d+$", call.name) or len(tensors) != 3:
        return None
    multiply_adds = math.sqrt(math.prod(tensor.numel for tensor in tensors))
    return Cost(2.0 * multiply_adds, float(_total(tensors)), tensors[0].dtype, is_matmul=True)


TRAFFIC: dict[str, Model] = {
    **dict.fromkeys(OPERANDS, elementwise),
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
