"""The attention core: heads in, heads out, by the implementation that was asked for."""

# B batch, H heads, T queries, S keys, D head width
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

    def forward(
        self, q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, documents_BS: Tensor | None = None
    ) -> Tensor:
        """Return (B, H, T, D). The queries stand at the last T of the S keys.

        With `documents_BS`, a query sees the keys of its own document only.
        """
        inputs = (q_BHTD, k_BHSD, v_BHSD, self.causal, documents_BS)
        self.ran = attention_op.choose(self.impl, *inputs)
        return attention_op.attention(self.ran, *inputs)
