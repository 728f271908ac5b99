"""The attention core: heads in, heads out, by the implementation that was asked for."""

# B batch, H heads, T tokens, D head width
from __future__ import annotations

from torch import Tensor, nn

from steplab.kernels import attention as attention_op
from steplab.kernels.impl import AUTO


class Attention(nn.Module):
    """Scaled dot-product attention with a choice of implementation; it has no parameters."""

    op = "attention"

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.impl = AUTO
        self.ran = ""

    def forward(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        """Return (B, H, T, D)."""
        self.ran = attention_op.choose(self.impl, q_BHTD, k_BHTD, v_BHTD, self.causal)
        return attention_op.attention(self.ran, q_BHTD, k_BHTD, v_BHTD, self.causal)
