"""The activation between an expert's two matrices."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def activate(z: Tensor, activation: str) -> Tensor:
    """Return gelu(z), or silu(gate) * up for swiglu, whose z holds both halves."""
    if activation == "gelu":
        return F.gelu(z)
    assert activation == "swiglu", activation
    gate, up = z.chunk(2, dim=-1)
    return F.silu(gate) * up
