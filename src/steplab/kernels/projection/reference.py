"""The definition: torch's own product."""

# D width, N outputs
from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def projection(x: Tensor, w_ND: Tensor, bias_N: Tensor | None) -> Tensor:
    """Map (..., D) to (..., N)."""
    return F.linear(x, w_ND, bias_N)
