"""Layers that a block is made of: norms, and the complex moving averages.

Norms store their scale minus one, so that weight decay pulls the scale toward 1.
"""

# B batch, L tokens, D width, N modes
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steplab.kernels import ema as ema_op
from steplab.kernels import timestep_norm as norm_op
from steplab.kernels.dispatch import AUTO
from steplab.kernels.ema import EMAParameters
from steplab.kernels.timestep_norm import Affine, Statistics
from steplab.modules.precision import Fp32Module, matmul_dtype, without_autocast


class ZeroCenteredRMSNorm(Fp32Module):
    """x / sqrt(mean(x^2) + eps), times 1 + weight."""

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


class ZeroCenteredLayerNorm(Fp32Module):
    """Mean 0 and variance 1, times 1 + weight, plus bias."""

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


class TimestepNorm(Fp32Module):
    """Normalizes a token by the mean and variance of its group over all tokens up to itself."""

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


class MovingAverages(Fp32Module):
    """ComplexEMA: every channel runs through N complex moving averages and is read out again."""

    op = "ema"

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.alpha_DN = nn.Parameter(torch.empty(width, modes))
        self.delta_DN = nn.Parameter(torch.empty(width, modes))
        self.theta_D = nn.Parameter(torch.empty(width))
        self.gamma_DN2 = nn.Parameter(torch.empty(width, modes, 2))
        self.omega_D = nn.Parameter(torch.empty(width))
        self.impl = AUTO
        self.ran = ""
        self.initialize()

    @torch.no_grad()
    def initialize(self) -> None:
        """Angles from 1 down to 1 / D of a turn, spread over the channels in a random order."""
        nn.init.normal_(self.alpha_DN, std=0.2)
        nn.init.normal_(self.delta_DN, std=0.2)
        nn.init.normal_(self.gamma_DN2)
        self.gamma_DN2[..., 1] = 0.0
        nn.init.trunc_normal_(self.omega_D, std=0.25, a=-1.0, b=1.0)
        D, device = len(self.omega_D), self.omega_D.device
        rank_D = torch.arange(1, D + 1, dtype=torch.float64, device=device)
        share_D = (float(D) ** (-rank_D / D)).clamp(1e-6, 1 - 1e-6)
        order_D = torch.randperm(D, device=device)
        self.theta_D.copy_(share_D.logit()[order_D])

    def forward(
        self, x_BLD: Tensor, state_B2ND: Tensor | None = None, keeps: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return (B, L, D) and, if `keeps`, the state behind the last token."""
        parameters = self.parameters_now()
        self.ran = ema_op.choose(self.impl, x_BLD, parameters, state_B2ND)
        return ema_op.ema(self.ran, x_BLD, parameters, state_B2ND, keeps)

    def parameters_now(self) -> EMAParameters:
        """Return the parameters as the op takes them."""
        stored = (self.alpha_DN, self.delta_DN, self.theta_D, self.gamma_DN2, self.omega_D)
        return EMAParameters(*stored)
