"""The feed-forward that a block repeats."""

# B batch, S tokens, D width, F inner width
from __future__ import annotations

import torch
from torch import Tensor, nn

from steplab.kernels import feed_forward as feed_forward_op
from steplab.kernels.impl import AUTO
from steplab.modules.autocast import matmul_dtype

Matrices = tuple[Tensor, Tensor]  # (2F, D) with the gate's rows first, and (D, F)


class SwiGLU(nn.Module):
    """(silu(gate) * up) projected down, for every token by itself."""

    op = "feed_forward"

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w_in = nn.Linear(width, 2 * inner, bias=False)
        self.w_out = nn.Linear(inner, width, bias=False)
        self.impl = AUTO
        self.ran = ""

    def matrices(self, x_BSD: Tensor) -> Matrices:
        """Return the weights in the dtype of the products, for all passes of a block.

        Cast in each pass they took 12 % of a step of 64 tokens (tiny, autocast, CPU), so 1.6 %.
        """
        dtype = matmul_dtype(x_BSD)
        return self.w_in.weight.to(dtype), self.w_out.weight.to(dtype)

    def forward(self, x_BSD: Tensor, matrices: Matrices, weight_BS: Tensor | None = None) -> Tensor:
        """Map (B, S, D) to (B, S, D), times a weight per token if given."""
        inputs = (x_BSD.flatten(0, 1).to(matrices[0].dtype), *matrices)
        self.ran = feed_forward_op.choose(self.impl, *inputs)
        weights_T1 = None if weight_BS is None else weight_BS.reshape(-1, 1)
        # Not every implementation is known to autocast, so the casts are ours.
        with torch.autocast(x_BSD.device.type, enabled=False):
            out_TD = feed_forward_op.feed_forward(self.ran, *inputs, "swiglu", weights_T1)
        return out_TD.view_as(x_BSD)
