"""Rows in groups, one matrix per group: (R, K) x (E, K, N) -> (R, N).

`offsets_E` (int32) holds the end of each group; the last one is R. Two implementations: `aten`
(torch's own op: one kernel, offsets stay on the device) and `loop` (group by group, for what
torch's op cannot take). Each file offers `product` and `weight_gradient`.
"""

# R rows, E groups, K inner width, N outer width
from __future__ import annotations

import torch
from torch import Tensor

from steplab.kernels.grouped_mm._op import make_op
from steplab.kernels.impl import impls, load, select

IMPLS = {name: load("grouped_mm", name) for name in impls("grouped_mm")}
PREFERENCE = ("aten", "loop")
OPS = {
    name: make_op(name, impl.product, impl.weight_gradient, impl.TAGS)
    for name, impl in IMPLS.items()
}


def choose(impl: str, x_RK: Tensor, w_EKN: Tensor) -> str:
    """Return the implementation to run; `auto` takes torch's op wherever it can run."""
    return select("grouped_mm", IMPLS, PREFERENCE, impl, x_RK, w_EKN)


def grouped_mm(impl: str, x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    """Return (R, N) by exactly the implementation named (not `auto`)."""
    return OPS[impl](x_RK, w_EKN, offsets_E.to(torch.int32).contiguous())


def product(impl: str, x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    """As `grouped_mm`, for layers that are one op themselves: autograd does not see it."""
    out_RN: Tensor = IMPLS[impl].product(x_RK, w_EKN, offsets_E)
    return out_RN


def weight_gradient(impl: str, x_RK: Tensor, dout_RN: Tensor, offsets_E: Tensor) -> Tensor:
    """Return (E, K, N), x^T dout of each group, unseen by autograd as well."""
    dw_EKN: Tensor = IMPLS[impl].weight_gradient(x_RK, dout_RN, offsets_E)
    return dw_EKN
