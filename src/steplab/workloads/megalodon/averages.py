"""The complex moving averages of a block, by the implementation that was asked for."""

# B batch, L tokens, D width, N modes
from __future__ import annotations

import torch
from torch import Tensor, nn

from steplab.kernels import ema as ema_op
from steplab.kernels.ema import Parameters
from steplab.kernels.impl import AUTO
from steplab.modules.precise import Precise


class MovingAverages(Precise):
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
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
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

    def parameters_now(self) -> Parameters:
        """Return the parameters as the op takes them."""
        stored = (self.alpha_DN, self.delta_DN, self.theta_D, self.gamma_DN2, self.omega_D)
        return Parameters(*stored)
