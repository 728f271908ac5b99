"""RoundedProducts: fp64 in which only matrix products are rounded, the least a precision costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from steplab.trace.categories import PRODUCT_OPS

BITS = {"tf32": 11, "bf16": 8, "fp16": 11}  # of the significand, the hidden one included
TORCH_PREFIXES = ("aten::", "prim")
CUSTOM_OP_NDIM = 2  # a custom op hides what it does: its matrices may be factors
# Ops with products inside, by a word in their names, and the fewest dimensions of their factors:
# the sums of exponentials that attention hands to its backward are not factors.
FACTOR_NDIM = {"attention": 4, "rnn": 2, "lstm": 2, "gru": 2}


def unit_roundoff(dtype: str) -> float:
    """Return the largest relative error of one rounding to fp32, tf32, bf16 or fp16."""
    return 2.0 ** -BITS.get(dtype, 24)


def rounded(x: Tensor, bits: int) -> Tensor:
    """Round to `bits` of significand, to even, with fp64's range: overflow is not modeled."""
    if bits == BITS["bf16"]:  # whose range is fp32's, and a cast is five times quicker
        return x.to(torch.bfloat16).double()
    significand, exponent = torch.frexp(x)
    return torch.ldexp(torch.round(significand * 2.0**bits) * 2.0**-bits, exponent)


class RoundedProducts(TorchDispatchMode):
    """Rounds the factors and the results of every matrix product, forward and backward.

    A tensor core cannot avoid these roundings; sums inside a product, and everything between
    products, stay exact. So the distance from fp64 is what a careful implementation in `dtype` may
    show.
    """

    supports_higher_order_operators = True

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.bits = BITS[dtype]

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
            is_factor = isinstance(leaf, Tensor) and leaf.dtype == torch.float64
            return rounded(leaf, self.bits) if is_factor and leaf.ndim >= least else leaf

        return tree_map(rounding, func(*tree_map(rounding, args), **kwargs))


def min_factor_ndim(op: str) -> int | None:
    """Return the fewest dimensions of an op's factors; None: it has no matrix product."""
    if op in PRODUCT_OPS or op == "aten::convolution":
        return 1
    held = next((least for word, least in FACTOR_NDIM.items() if word in op), None)
    return held if held or op.startswith(TORCH_PREFIXES) else CUSTOM_OP_NDIM
