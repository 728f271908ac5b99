"""The definition of ComplexEMA, step by step, in fp32 or better."""

# B batch, L steps of time, D channels, N modes of each
from __future__ import annotations

import torch
from torch import Tensor

from steplab.kernels.ema import EMAParameters, coefficients, complex_state, stored_state


def ema(
    x_BLD: Tensor, parameters: EMAParameters, state_B2ND: Tensor | None, wants_last: bool
) -> tuple[Tensor, Tensor | None]:
    """Return y_t = Re(sum of c g_t) + omega x_t with g_t = q g_{t-1} + x_t, and the last g."""
    real = torch.promote_types(x_BLD.dtype, torch.float32)
    kind = torch.complex128 if real == torch.float64 else torch.complex64
    found = coefficients(parameters)
    q_DN, read_DN = found.q_DN.to(kind), found.read_DN.to(kind)
    omega_D = parameters.omega_D.to(real)
    B, L, D = x_BLD.shape
    if state_B2ND is None:
        g_BDN = torch.zeros(B, D, q_DN.shape[1], dtype=kind, device=x_BLD.device)
    else:
        g_BDN = complex_state(state_B2ND.to(real))
    outputs = []
    for x_BD in x_BLD.to(real).unbind(1):
        g_BDN = q_DN * g_BDN + x_BD[..., None]
        outputs.append((read_DN * g_BDN).sum(-1).real + omega_D * x_BD)
    y_BLD = torch.stack(outputs, 1) if L else x_BLD
    return y_BLD.to(x_BLD.dtype), stored_state(g_BDN) if wants_last else None
