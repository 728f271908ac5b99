"""The norm of a residual stream, by the implementation that was asked for."""

# D width
from __future__ import annotations

import torch
from torch import Tensor, nn

from steplab.kernels import rms_norm as rms_norm_op
from steplab.kernels.impl import AUTO
from steplab.modules.autocast import matmul_dtype


class RMSNorm(nn.Module):
    """Root-mean-square norm; its only parameter is called `weight`, as that of nn.RMSNorm is."""

    op = "rms_norm"

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.impl = AUTO
        self.ran = ""

    def forward(self, x: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (normed, stream), both (..., D): the stream is x, or x + added.

        The norm comes in the dtype of the matrix product that takes it: autocast's where it is on.
        Go on with the returned stream: then one kernel adds its gradients in the backward.
        """
        self.ran = rms_norm_op.choose(self.impl, x, self.weight, added)
        return rms_norm_op.rms_norm(
            self.ran, x, self.weight, self.eps, added, dtype=matmul_dtype(x)
        )
