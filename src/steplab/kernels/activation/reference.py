"""The definition, in the dtype of z; sums over a row in fp32 or better."""

# R rows, F inner width
from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from steplab.kernels.activation import RowWeights


def activate(z: Tensor, activation: str) -> Tensor:
    """Return gelu(z), or silu(gate) * up for swiglu, whose z holds both halves."""
    if activation == "gelu":
        return F.gelu(z)
    assert activation == "swiglu", activation
    gate, up = z.chunk(2, dim=-1)
    return F.silu(gate) * up


def forward(z: Tensor, activation: str, weights: RowWeights | None = None) -> Tensor:
    """Return (R, F)."""
    h_RF = activate(_wide(z), activation)
    return (h_RF if weights is None else h_RF * _of_rows(weights)).to(z.dtype)


def backward(
    z: Tensor, dh_RF: Tensor, activation: str, weights: RowWeights | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return dz, the weighted activation and the gradient of the weights."""
    dh_RF, dtype, z = _wide(dh_RF), z.dtype, _wide(z)
    h_RF = activate(z, activation)
    dz = slope(z, dh_RF, activation)
    if weights is None:
        return dz.to(dtype), h_RF.to(dtype), None
    dot_R, weight_R1 = (dh_RF * h_RF).sum(-1), _of_rows(weights)
    if weights.source_R is not None:
        dot_R = torch.empty_like(dot_R).scatter_(0, weights.source_R.long(), dot_R)
    return (dz * weight_R1).to(dtype), (h_RF * weight_R1).to(dtype), dot_R


def slope(z: Tensor, dh_RF: Tensor, activation: str) -> Tensor:
    """Return the gradient of z, given that of act(z)."""
    if activation == "gelu":
        below = 0.5 * torch.erfc(z * -math.sqrt(0.5))
        density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        return dh_RF * (below + z * density)
    assert activation == "swiglu", activation
    gate, up = z.chunk(2, dim=-1)
    open_ = gate.sigmoid()
    dgate = dh_RF * up * open_ * (1 + gate * (1 - open_))
    return torch.cat([dgate, dh_RF * gate * open_], -1)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _of_rows(weights: RowWeights) -> Tensor:
    values_R = weights.values_R
    source_R = weights.source_R
    return (values_R if source_R is None else values_R[source_R])[:, None]
