"""Work of matrix products, convolutions and attention: FLOPs and least bytes of one call."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from steplab.hardware import op_costs
from steplab.trace.shapes import Call, Dims, Tensor, broadcast


@dataclass(frozen=True)
class Cost:
    """What a call has to do at least."""

    flops: float  # of matrix units; 0 for work that memory bounds anyway
    bytes: float  # each operand read once, each result written once; nan: unknown
    dtype: str = ""  # Kineto's word for the type of the factors; "" where nothing is multiplied
    is_matmul: bool = False  # a matrix product or convolution; False for attention


Model = Callable[[Call], Cost | None]


def _product(a: Tensor, b: Tensor, added: Tensor | None = None) -> Cost:
    """(..., M, K) x (..., K, N), or a vector on either side."""
    a_dims = a.dims if len(a.dims) > 1 else (1, *a.dims)
    b_dims = b.dims if len(b.dims) > 1 else (*b.dims, 1)
    batch = math.prod(broadcast(a_dims[:-2], b_dims[:-2]))
    M, K, N = a_dims[-2], a_dims[-1], b_dims[-1]
    moved = a.bytes + b.bytes + batch * M * N * a.item + (added.bytes if added else 0)
    return Cost(batch * op_costs.matmul(M, N, K), moved, a.dtype, is_matmul=True)


def _plain(call: Call) -> Cost | None:
    a, b = call.tensor(0), call.tensor(1)
    return _product(a, b) if a and b and a.dims and b.dims else None


def _added(call: Call) -> Cost | None:
    """added * beta + a x b; with beta = 0 the first tensor is not read."""
    added, a, b = call.tensor(0), call.tensor(1), call.tensor(2)
    if not (added and a and b):
        return None
    beta_is_0 = len(call.values) > 3 and call.values[3] in ("0", "0.")
    return _product(a, b, None if beta_is_0 else added)


def _linear(call: Call) -> Cost | None:
    x, weight_NK = call.tensor(0), call.tensor(1)
    if not (x and weight_NK and len(weight_NK.dims) == 2 and x.dims):
        return None
    rows = Tensor((x.numel // max(x.dims[-1], 1), x.dims[-1]), x.dtype)
    return _product(rows, Tensor(weight_NK.dims[::-1], weight_NK.dtype), call.tensor(2))


def _grouped(call: Call) -> Cost | None:
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
    return Cost(products * op_costs.matmul(M, N, K), moved, a.dtype, is_matmul=True)


def _convolution(stride: int, padding: int, dilation: int, transposed: int = -1) -> Model:
    """Return the model of a forward convolution; the numbers are positions of its arguments."""

    def model(call: Call) -> Cost | None:
        x, weight = call.tensor(0), call.tensor(1)
        steps, pads = call.integers(stride), call.integers(padding)
        spread = call.integers(dilation)
        if not (x and weight and steps and pads and spread):
            return None
        if transposed >= 0 and call.truth(transposed) is not False:
            return None
        size = _window_places(x.dims[2:], weight.dims[2:], steps, pads, spread)
        flops = _convolution_flops((x.dims[0], weight.dims[0], *size), weight)
        moved = x.bytes + weight.bytes + x.dims[0] * weight.dims[0] * math.prod(size) * x.item
        return Cost(flops, moved, x.dtype, is_matmul=True)

    return model


def _window_places(size: Dims, window: Dims, stride: Dims, padding: Dims, dilation: Dims) -> Dims:
    """Return how many places a window takes along each dimension."""
    each = zip(size, window, _full(stride, size), _full(padding, size), _full(dilation, size),
               strict=True)  # fmt: skip
    return tuple((n + 2 * pad - d * (w - 1) - 1) // step + 1 for n, w, step, pad, d in each)


def _full(values: Dims, like: Dims) -> Dims:
    """One value stands for all dimensions."""
    return values * len(like) if len(values) == 1 else values


def _convolution_flops(out_BC: Dims, weight: Tensor) -> float:
    """Every output element meets one filter: (channels of the group) x (window)."""
    return op_costs.matmul(math.prod(out_BC), 1, math.prod(weight.dims[1:]))


def _convolution_backward(call: Call) -> Cost | None:
    """One product for each gradient that is asked for: of the input, of the weight."""
    grad, x, weight = call.tensor(0), call.tensor(1), call.tensor(2)
    asked = call.truths(10)
    if not (grad and x and weight and asked) or call.truth(7) is None:
        return None
    # A transposed convolution is the gradient of a plain one: its input plays the output.
    out = x if call.truth(7) else grad
    moved = grad.bytes + x.bytes + weight.bytes + asked[0] * x.bytes + asked[1] * weight.bytes
    flops = (asked[0] + asked[1]) * _convolution_flops(out.dims, weight)
    return Cost(flops, moved, x.dtype, is_matmul=True)


def attention(query: int, causal: int, heads_first: bool = True, documents: int = -1) -> Model:
    """Return the model of fused attention; a gradient op has its query behind `grad_out`.

    `causal` is the position of a bool, or of a mask type whose 0 means none. Ragged batches
    (three dimensions, or a tensor at the position `documents`) do not tell their lengths and
    have no model.
    """
    backward = query == 1

    def model(call: Call) -> Cost | None:
        q, k, v = (call.tensor(query + i) for i in range(3))
        mask = call.truth(causal) if call.integer(causal) is None else call.integer(causal) != 0
        if not (q and k and v) or len(q.dims) != 4 or mask is None:
            return None
        if documents >= 0 and call.tensor(documents):
            return None
        B, H, T, D = q.dims if heads_first else (q.dims[0], q.dims[2], q.dims[1], q.dims[3])
        S, d_v = k.dims[2 if heads_first else 1], v.dims[3]
        shape = (B * op_costs.attention_pairs(T, S, mask), H, D, d_v)
        out = B * H * T * d_v * q.item
        moved = (q.bytes + k.bytes + v.bytes + out) * (2 if backward else 1)
        if backward:
            return Cost(op_costs.attention_backward(*shape, recompute=True), moved, q.dtype)
        return Cost(op_costs.attention_forward(*shape), moved, q.dtype)

    return model


_SDPA = "aten::_scaled_dot_product"
PRODUCTS: dict[str, Model] = {
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
    f"{_SDPA}_flash_attention": attention(0, 4),
    f"{_SDPA}_flash_attention_for_cpu": attention(0, 4),
    f"{_SDPA}_efficient_attention": attention(0, 6),
    f"{_SDPA}_cudnn_attention": attention(0, 6),
    "aten::_flash_attention_forward": attention(0, 8, heads_first=False),
    "aten::_efficient_attention_forward": attention(0, 9, heads_first=False),
    "aten::_cudnn_attention_forward": attention(0, 10),
    f"{_SDPA}_flash_attention_backward": attention(1, 11),
    f"{_SDPA}_flash_attention_for_cpu_backward": attention(1, 7),
    f"{_SDPA}_efficient_attention_backward": attention(1, 11),
    f"{_SDPA}_cudnn_attention_backward": attention(1, 14),
    "aten::_flash_attention_backward": attention(1, 11, heads_first=False),
    "aten::_efficient_attention_backward": attention(1, 14, heads_first=False),
    "aten::_cudnn_attention_backward": attention(1, 14),
}
