"""What a precision cannot avoid: fp64, with roundings where a careful step has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from steplab.step.step import Step
from steplab.trace.categories import PRODUCT_OPS
from steplab.verify.numerics import BITS
from steplab.workloads.workload import StepOutput

TORCH_PREFIXES = ("aten::", "prim")
# Words in the names of what stays in fp32 beside 16-bit weights: what autocast computes so, but for
# norms, whose results are narrow; and batch norm, which also writes its statistics.
FP32_OPS = (
    *("softmax", "loss", "sum", "mean", "log", "exp", "pow", "var", "rsqrt", "linalg"),
    "batch_norm",
)
STREAM_NDIM = 2  # the fewest dimensions of what flows through a model
CUSTOM_OP_NDIM = 2  # a custom op hides what it does: its matrices may be factors
# Ops with products inside, by a word in their names, and the fewest dimensions of their factors:
# the sums of exponentials that attention hands to its backward are not factors.
FACTOR_NDIM = {"attention": 4, "rnn": 2, "lstm": 2, "gru": 2}


def rounded(x: Tensor, bits: int) -> Tensor:
    """Round to `bits` of significand, to even, with fp64's range: overflow is not modeled."""
    if bits == BITS["bf16"]:  # whose range is fp32's, and a cast is five times quicker
        return x.to(torch.bfloat16).to(x.dtype)
    significand, exponent = torch.frexp(x)
    return torch.ldexp(torch.round(significand * 2.0**bits) * 2.0**-bits, exponent)


class RoundedProducts(TorchDispatchMode):
    """Rounds the factors and the results of every matrix product, forward and backward.

    A tensor core cannot avoid these roundings; sums inside a product, and everything between
    products, stay exact. So the distance from fp64 is what a careful implementation in `dtype` may
    show.
    """

    supports_higher_order_operators = True

    def __init__(self, dtype: str, kind: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.bits = BITS[dtype]
        self.kind = kind  # of the numbers that are rounded

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the op, with rounded inputs and outputs where it multiplies matrices."""
        kwargs = dict(kwargs or {})
        if isinstance(func, HigherOrderOperator):
            return func(*args, **kwargs)
        least = min_factor_ndim(f"{func.namespace}::{func._overloadpacket.__name__}")
        if least is None or func._schema.is_mutable:  # the change would be lost in a rounded copy
            return func(*args, **kwargs)

        def rounding(leaf: Any) -> Any:
            is_factor = isinstance(leaf, Tensor) and leaf.dtype == self.kind
            return rounded(leaf, self.bits) if is_factor and leaf.ndim >= least else leaf

        return tree_map(rounding, func(*tree_map(rounding, args), **kwargs))


class RoundedStream(RoundedProducts):
    """Rounds all that a model whose weights are bf16 computes, but for what autocast does in fp32.

    Results of two dimensions or more: a loss is not part of the stream. What is written in place is
    exact, and so are statistics of norms and the update.
    """

    def __init__(self, dtype: str, kind: torch.dtype, step: Step) -> None:
        super().__init__(dtype, kind)
        self.in_passes = False  # forward and backward
        accumulate = step.accumulate

        def passes(micro_batches: Sequence[Any]) -> StepOutput:
            self.in_passes = True
            try:
                return accumulate(micro_batches)
            finally:
                self.in_passes = False

        step.accumulate = passes  # type: ignore[method-assign]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the op, with rounded inputs and outputs where its results are in the stream."""
        if not self.in_passes or not _is_stream(func):
            return super().__torch_dispatch__(func, types, args, kwargs)

        def rounding(leaf: Any) -> Any:
            is_number = isinstance(leaf, Tensor) and leaf.dtype == self.kind and leaf.ndim > 0
            return rounded(leaf, self.bits) if is_number else leaf

        out = func(*tree_map(rounding, args), **(kwargs or {}))
        found = out[0] if isinstance(out, tuple) and out else out
        if not isinstance(found, Tensor) or found.ndim < STREAM_NDIM:
            return func(*args, **(kwargs or {}))
        if isinstance(out, tuple) and "backward" not in func._schema.name:
            return (rounding(out[0]), *out[1:])  # of a norm, with its statistics
        return tree_map(rounding, out)


def _is_stream(func: Any) -> bool:
    """Whether an op makes new numbers between products, which bf16 would round."""
    if isinstance(func, HigherOrderOperator) or func._schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    op = f"{func.namespace}::{func._overloadpacket.__name__}"
    is_view = any(returned.alias_info for returned in func._schema.returns)
    is_exact = any(word in op for word in FP32_OPS)
    return not (is_view or is_exact or min_factor_ndim(op) is not None)


def min_factor_ndim(op: str) -> int | None:
    """Return the fewest dimensions of an op's factors; None: it has no matrix product."""
    if op in PRODUCT_OPS or op == "aten::convolution":
        return 1
    inside = next((least for word, least in FACTOR_NDIM.items() if word in op), None)
    return inside if inside or op.startswith(TORCH_PREFIXES) else CUSTOM_OP_NDIM
