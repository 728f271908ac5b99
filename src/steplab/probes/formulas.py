"""FLOPs of single ATen calls from their arguments, where torch's own counter has no formula.

A formula is called with the arguments of the op and its (first) output as `out_val`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from steplab.costs import op_flops
from steplab.costs.op_call import OpCall, TensorArg
from steplab.costs.own_ops import find_own_op

aten = torch.ops.aten
Formula = Callable[..., float]

# Other namespaces are custom ops, which may do anything: without a formula they are reported.
LIGHT_NAMESPACES = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional")
# Words in the names of ATen ops that multiply matrices; without a formula they are reported too.
HEAVY_WORDS = re.compile(
    r"(^|_)([a-z]*mm|matmul|mv|linear|trilinear|conv|convolution|attention|transformer"
    r"|rnn|lstm|gru|cdist|pdist|euclidean|cholesky|linalg|solve|geqrf|ormqr)(?=_|$)"
)
# Exceptions: norms, checks, copies, and cells whose matrix products are separate calls.
LIGHT_OPS = frozenset(
    (
        "linalg_vector_norm",
        "linalg__powsum",
        "linalg_cross",
        "_linalg_check_errors",
        "_cudnn_rnn_flatten_weight",
        "_thnn_fused_lstm_cell",
        "_thnn_fused_lstm_cell_backward_impl",
        "_thnn_fused_gru_cell",
        "_thnn_fused_gru_cell_backward",
    )
)
ATTENTION_OPS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


def is_heavy(namespace: str, name: str) -> bool:
    """Whether an op without a formula may do matrix work that a count would miss."""
    if namespace not in LIGHT_NAMESPACES:
        return True
    return name not in LIGHT_OPS and HEAVY_WORDS.search(name) is not None


def _attention(op: Any, visible: bool, backward: bool) -> Formula:
    """Return a formula for a fused attention op, over visible or over all pairs."""
    names = [argument.name for argument in op.default._schema.arguments]

    def formula(*args: Any, out_val: Any = None, **kwargs: Any) -> float:
        given = dict(zip(names, args, strict=False)) | kwargs
        q_BHTD, k_BHSD, v_BHSD = given["query"], given["key"], given["value"]
        B, H, T, d_qk = q_BHTD.shape
        causal = visible and bool(given.get("is_causal"))
        pairs = op_flops.attention_pairs(T, k_BHSD.shape[-2], causal) * B
        shape = (pairs, H, d_qk, v_BHSD.shape[-1])
        if backward:
            return op_flops.attention_backward(*shape, recompute=True)
        return op_flops.attention_forward(*shape)

    return formula


def _grouped_mm(a: Any, b: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> float:
    """Rows of every group meet one matrix: (M, K) x (E, K, N), or two ragged operands."""
    return 2.0 * out_val.numel() * a.shape[-1] if b.ndim == 3 else 2.0 * a.numel() * b.shape[-1]


def _product(a: Any, b: Any, *args: Any, **kwargs: Any) -> float:
    """(..., M, K) x (..., K, N), or with a vector (K) on the right: every element of a meets N."""
    return 2.0 * a.numel() * (b.shape[-1] if b.ndim > 1 else 1)


def _added_product(added: Any, a: Any, b: Any, *args: Any, **kwargs: Any) -> float:
    return _product(a, b)


def rnn_products(x: Any, weights: Any) -> float:
    """FLOPs of the forward of a recurrent layer or a stack of them, in one or both directions.

    `x` is (T, B, in), (B, T, in) or packed (rows, in). Each row meets every weight matrix once:
    (gates x hidden, in), (gates x hidden, hidden) and, with a projection, (out, hidden).
    """
    rows = x.numel() // x.shape[-1]
    return sum(op_flops.matmul(rows, *w.shape) for w in weights if w.ndim == 2)


def _mkldnn_layer(x: Any, w_input: Any, w_hidden: Any, *args: Any, **kwargs: Any) -> float:
    return rnn_products(x, (w_input, w_hidden))


def _mkldnn_layer_backward(x: Any, w_input: Any, w_hidden: Any, *args: Any, **kw: Any) -> float:
    return 2 * rnn_products(x, (w_input, w_hidden))  # one product for each factor's gradient


def _rnn(x: Any, weights: Any, *args: Any, **kwargs: Any) -> float:
    return rnn_products(x, weights)


def _rnn_backward(x: Any, weights: Any, *args: Any, **kwargs: Any) -> float:
    """Gradients of the data always; of the weights if the output mask asks for them."""
    output_mask = kwargs["output_mask"] if "output_mask" in kwargs else args[-1]
    return (2 if output_mask[3] else 1) * rnn_products(x, weights)


def _fft(x: Any, dims: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> float:
    real = not (x.is_complex() and out_val.is_complex())
    full = x if x.numel() >= out_val.numel() else out_val
    length = 1
    for dim in dims:
        length *= full.shape[dim]
    return op_flops.fft(length, full.numel() // max(length, 1), real)


def _scan(x: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> float:
    return op_flops.scan(x.numel())


def own_formula(name: str) -> Formula | None:
    """Return the formula of our op `name` from the table of costs; None if it has none."""
    op = find_own_op(name)
    if op is None or op.flops is None:
        return None

    def formula(*args: Any, **kwargs: Any) -> float:
        tensors = tuple(
            TensorArg(tuple(arg.shape), str(arg.dtype)) if isinstance(arg, torch.Tensor) else None
            for arg in args
        )
        values = tuple(
            "" if tensor else str(arg) for tensor, arg in zip(tensors, args, strict=True)
        )
        return op.call_flops(OpCall(name, tensors, (), values)) or 0.0

    return formula


MATRIX_OPS: dict[Any, Formula] = {
    aten._grouped_mm: _grouped_mm,
    aten.mv: _product,
    aten.dot: _product,
    aten.vdot: _product,
    aten._addmm_activation: _added_product,
    aten.addmm_: _added_product,
    aten.addbmm: _added_product,
    aten.addbmm_: _added_product,
    aten.baddbmm_: _added_product,
    aten.addmv: _added_product,
    aten.addmv_: _added_product,
    aten.mkldnn_rnn_layer: _mkldnn_layer,
    aten.mkldnn_rnn_layer_backward: _mkldnn_layer_backward,
    aten._cudnn_rnn: _rnn,
    aten._cudnn_rnn_backward: _rnn_backward,
    aten.miopen_rnn: _rnn,
    aten.miopen_rnn_backward: _rnn_backward,
}
# Work outside the tensor cores.
VECTOR_OPS: dict[Any, Formula] = {
    aten._fft_r2c: _fft,
    aten._fft_c2r: _fft,
    aten._fft_c2c: _fft,
    aten.cumsum: _scan,
    aten.cumprod: _scan,
    aten.logcumsumexp: _scan,
}


def matrix_formulas(visible: bool) -> dict[Any, Formula]:
    """Return the formulas of ATen ops; attention counts visible pairs or all of them.

    torch's own counter has 0 for attention on a CPU, and counts every pair of causal attention.
    """
    found = dict(MATRIX_OPS)
    for name in ATTENTION_OPS:
        for op, backward in ((name, False), (f"{name}_backward", True)):
            if hasattr(aten, op):
                packet = getattr(aten, op)
                found[packet] = _attention(packet, visible, backward)
    return found
