"""The definition of the rotation."""

# B batch, T tokens, H heads, D head width
from __future__ import annotations

import torch
from torch import Tensor


def rotate(x_BHTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the rotated tensor in its own dtype; the rotation is computed in that of the angles.

    `cos` and `sin` are (T, D / 2) or (B, 1, T, D / 2).
    """
    left, right = x_BHTD.chunk(2, dim=-1)
    rotated = (left * cos - right * sin, right * cos + left * sin)
    return torch.cat(rotated, dim=-1).to(x_BHTD.dtype)


def rotary(qkv_BT3HD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v, (B, H, T, D) each."""
    q, k, v = (part.transpose(1, 2) for part in qkv_BT3HD.unbind(2))
    return rotate(q, cos, sin), rotate(k, cos, sin), v
