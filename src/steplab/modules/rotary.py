"""Rotary position embedding; the halves of a head are rotated against each other."""

# B batch, H heads, T tokens, D head width
from __future__ import annotations

import torch
from torch import Tensor, nn

from steplab.kernels import rotary as rotary_op
from steplab.kernels.dispatch import AUTO
from steplab.kernels.rotary.reference import rotate
from steplab.modules.precision import Fp32Module

Angles = tuple[Tensor, Tensor]  # cosines and sines, (T, D / 2) or (B, 1, T, D / 2)


class Rotary(Fp32Module):
    """Rotates queries and keys by angles that grow with the position, from a table in fp32."""

    cos_TD: Tensor
    sin_TD: Tensor

    def __init__(self, head_width: int, max_context: int, theta: float) -> None:
        super().__init__()
        self.head_width, self.theta = head_width, theta
        cos_TD, sin_TD = self._table(max_context)
        self.register_buffer("cos_TD", cos_TD, persistent=False)
        self.register_buffer("sin_TD", sin_TD, persistent=False)

    def forward(self, x_BHTD: Tensor, angles: Angles | None = None) -> Tensor:
        """Return the rotated tensor in its own dtype; the rotation is computed in fp32.

        Without `angles` the tokens stand at positions 0 to T - 1.
        """
        return rotate(x_BHTD, *(angles or self.first(x_BHTD.shape[-2])))

    def first(self, tokens: int) -> Angles:
        """Return the angles of the positions 0 to `tokens` - 1."""
        return self.cos_TD[:tokens], self.sin_TD[:tokens]

    def angles(self, positions_BT: Tensor) -> Angles:
        """Return the angles of tokens at these positions, for all layers at once."""
        return self.cos_TD[positions_BT][:, None], self.sin_TD[positions_BT][:, None]

    def reserve(self, positions: int) -> None:
        """Extend the table to `positions`. Beyond the trained ones a model extrapolates."""
        if positions <= len(self.cos_TD):
            return
        # A table made in inference mode could not be trained with afterward.
        with torch.inference_mode(False):
            cos_TD, sin_TD = self._table(positions)
            self.cos_TD, self.sin_TD = cos_TD.to(self.cos_TD), sin_TD.to(self.sin_TD)

    def _table(self, positions: int) -> Angles:
        # fp64 on the host: at position 8191 an fp32 product is off by 5e-4 radians.
        exponents_D = torch.arange(0, self.head_width, 2, dtype=torch.float64) / self.head_width
        frequencies_D = self.theta**-exponents_D
        angles_TD = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies_D)
        return angles_TD.cos().float(), angles_TD.sin().float()


class RotaryHeads(nn.Module):
    """Queries, keys and values from their joint projection, queries and keys rotated."""

    op = "rotary"

    def __init__(self, rotary: Rotary, heads: int) -> None:
        super().__init__()
        self.table = rotary
        self.heads = heads
        self.impl = AUTO
        self.ran = ""

    def forward(
        self, qkv_BTD: Tensor, angles: Angles | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Map (B, T, 3 H D) to q, k and v, (B, H, T, D) each; q and k are rotated.

        Without `angles` the tokens stand at positions 0 to T - 1.
        """
        qkv_BT3HD = qkv_BTD.unflatten(-1, (3, self.heads, -1))
        cos, sin = angles or self.table.first(qkv_BTD.shape[1])
        self.ran = rotary_op.choose(self.impl, qkv_BT3HD, cos)
        return rotary_op.rotary(self.ran, qkv_BT3HD, cos, sin)
