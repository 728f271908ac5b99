"""Norms: two that store their scale minus one, and one whose statistics run along time."""

# B batch, L tokens, D width
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steplab.kernels import timestep_norm as norm_op
from steplab.kernels.impl import AUTO
from steplab.kernels.timestep_norm import Affine, Statistics
from steplab.modules.autocast import matmul_dtype, without_autocast
from steplab.modules.precise import Precise


class RootMeanSquareNorm(Precise):
    """x / sqrt(mean(x^2) + eps) times 1 + weight: weight decay pulls the scale towards 1."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., D) to (..., D) in the dtype of the product that follows."""
        dtype = matmul_dtype(x)
        with torch.autocast(x.device.type, enabled=False):
            y = F.rms_norm(x, self.weight.shape, (1 + self.weight).to(x.dtype), self.eps)
        return y.to(dtype)


class LayerNorm(Precise):
    """Mean 0, deviation 1, times 1 + weight, plus bias."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., D) to (..., D) in the dtype of the product that follows."""
        dtype = matmul_dtype(x)
        with torch.autocast(x.device.type, enabled=False):
            scale, shift = (1 + self.weight).to(x.dtype), self.bias.to(x.dtype)
            y = F.layer_norm(x, self.weight.shape, scale, shift, self.eps)
        return y.to(dtype)


class TimestepNorm(Precise):
    """Normalises a token by the mean and variance of its group over all tokens up to itself."""

    op = "timestep_norm"

    def __init__(self, width: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.groups, self.eps = groups, eps
        self.impl = AUTO
        self.ran = ""

    def forward(
        self,
        x_BLD: Tensor,
        before: Statistics | None = None,
        valid_BL: Tensor | None = None,
        keeps: bool = False,
    ) -> tuple[Tensor, Statistics | None]:
        """Return (B, L, D) and, if `keeps`, the statistics behind the last token.

        A token that is not valid changes no statistics, and its output is 0.
        """
        dtype = matmul_dtype(x_BLD)
        affine = Affine(self.weight, self.bias, self.groups, self.eps)
        with without_autocast(x_BLD):
            self.ran = norm_op.choose(self.impl, x_BLD, affine, before, valid_BL)
            return norm_op.timestep_norm(
                self.ran, x_BLD, affine, before, valid_BL, keeps, dtype=dtype
            )
