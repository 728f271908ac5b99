"""Rotary position embedding, halves rotated against each other."""

# B batch, H heads, T tokens, D head width
from __future__ import annotations

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Rotates queries and keys by angles that grow with the position."""

    cos_TD: Tensor
    sin_TD: Tensor

    def __init__(self, head_width: int, max_context: int, theta: float) -> None:
        super().__init__()
        # fp64 on the host: at position 8191 an fp32 product is off by 5e-4 radians.
        frequencies = theta ** -(torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
        angles_TD = torch.outer(torch.arange(max_context, dtype=torch.float64), frequencies)
        self.register_buffer("cos_TD", angles_TD.cos().float(), persistent=False)
        self.register_buffer("sin_TD", angles_TD.sin().float(), persistent=False)

    def forward(self, x_BHTD: Tensor) -> Tensor:
        """Return the rotated tensor in its own dtype; the rotation is computed in fp32."""
        cos_TD, sin_TD = self.cos_TD[: x_BHTD.shape[-2]], self.sin_TD[: x_BHTD.shape[-2]]
        left, right = x_BHTD.chunk(2, dim=-1)
        rotated = (left * cos_TD - right * sin_TD, right * cos_TD + left * sin_TD)
        return torch.cat(rotated, dim=-1).to(x_BHTD.dtype)
