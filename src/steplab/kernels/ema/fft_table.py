"""ComplexEMA by Fourier transforms with every power of every mode in one table, (D, N, L).

This is how PyTorch ports of the original do it; it is kept to measure the others against, and has
no states.
"""

# B batch, L steps of time, D channels, N modes of each
from __future__ import annotations

import torch
from torch import Tensor

from steplab.core.errors import Unsupported
from steplab.kernels.ema import EMAParameters, coefficients
from steplab.kernels.ema.fft import causal_convolution

NOT_TUNED = "it is here to be measured against"


def ema(
    x_BLD: Tensor, parameters: EMAParameters, state_B2ND: Tensor | None, wants_last: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the outputs, and None for the state."""
    if state_B2ND is not None or wants_last:
        raise Unsupported("ema 'fft_table' has no states.", "Use impl.ema=fft or impl.ema=scan.")
    real = torch.promote_types(x_BLD.dtype, torch.float32)
    kind = torch.complex128 if real == torch.float64 else torch.complex64
    found = coefficients(parameters)
    log_q_DN = torch.complex(found.rho_DN.log(), found.phi_DN).to(kind)
    step_L = torch.arange(x_BLD.shape[1], dtype=real, device=x_BLD.device)
    powers_DNL = torch.exp(log_q_DN[..., None] * step_L)
    kernel_DL = (found.read_DN.to(kind)[..., None] * powers_DNL).sum(1).real
    x_BDL = x_BLD.transpose(1, 2).to(real)
    y_BDL = causal_convolution(x_BDL, kernel_DL)
    y_BDL = y_BDL + parameters.omega_D.to(real)[:, None] * x_BDL
    return y_BDL.transpose(1, 2).to(x_BLD.dtype), None
