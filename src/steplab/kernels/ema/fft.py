"""ComplexEMA as a convolution by Fourier transforms, in plain torch.

The kernel k_j = Re(sum of c q^j) is built from two short tables, q^j = q^(64 a) q^b, as one product
per channel: nothing of size D N L is ever made. The whole row enters every output through the
transforms, so a NaN anywhere in it spoils all of it.
"""

# B batch, L steps of time, D channels, N modes of each; A coarse and S fine steps, A S >= L
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from steplab.kernels.ema import (
    Coefficients,
    EMAParameters,
    coefficients,
    complex_state,
    stored_state,
)

FINE = 64  # steps that the fine table covers


def ema(
    x_BLD: Tensor, parameters: EMAParameters, state_B2ND: Tensor | None, wants_last: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the outputs and, if wanted, the last state in closed form."""
    real = torch.promote_types(x_BLD.dtype, torch.float32)
    # Autocast would round the products of the tables.
    with torch.autocast(x_BLD.device.type, enabled=False):
        found = coefficients(parameters)
        L = x_BLD.shape[1]
        x_BDL = x_BLD.transpose(1, 2).to(real)
        kernel_DL = expand(found, found.read_DN, L).to(real)
        y_BDL = causal_convolution(x_BDL, kernel_DL)
        y_BDL = y_BDL + parameters.omega_D.to(real)[:, None] * x_BDL
        state_BDN = None
        if state_B2ND is not None:
            state_BDN = complex_state(state_B2ND.double())
            y_BDL = y_BDL + expand(found, found.read_DN * found.q_DN * state_BDN, L).to(real)
        last = stored_state(last_state(found, x_BDL, state_BDN)).to(real) if wants_last else None
        return y_BDL.transpose(1, 2).to(x_BLD.dtype), last


def causal_convolution(x_BDL: Tensor, kernel_DL: Tensor) -> Tensor:
    """Return the sum over j of kernel_j x_{t-j}."""
    L = x_BDL.shape[-1]
    size = 1 << (2 * L - 1).bit_length()
    product = torch.fft.rfft(x_BDL, size) * torch.fft.rfft(kernel_DL, size)
    return torch.fft.irfft(product, size)[..., :L]


def tables(found: Coefficients, length: int) -> tuple[Tensor, Tensor]:
    """Return q^(64 a) and q^b, (D, N, A) and (D, N, 64) complex."""
    device = found.rho_DN.device
    coarse_A = FINE * torch.arange(-(-length // FINE), device=device)
    return found.powers(coarse_A), found.powers(torch.arange(FINE, device=device))


def expand(found: Coefficients, weights_DN: Tensor, length: int) -> Tensor:
    """Return Re(sum over n of weight q^j) for j < length, (..., D, L), from (..., D, N)."""
    coarse_DNA, fine_DNS = tables(found, length)
    left = (weights_DN[..., None] * coarse_DNA).transpose(-1, -2)
    left_DAM = torch.cat([left.real, -left.imag], -1)
    right_DMS = torch.cat([fine_DNS.real, fine_DNS.imag], -2)
    return (left_DAM @ right_DMS).flatten(-2)[..., :length]


def last_state(found: Coefficients, x_BDL: Tensor, state_BDN: Tensor | None) -> Tensor:
    """Return q^L g + the sum over j of q^j x_{L-1-j}, (B, D, N) complex128."""
    L = x_BDL.shape[-1]
    coarse_DNA, fine_DNS = tables(found, L)
    back_BDAS = F.pad(x_BDL.double().flip(-1), (0, -L % FINE)).unflatten(-1, (-1, FINE))
    fine_DSM = torch.cat([fine_DNS.real, fine_DNS.imag], -2).transpose(-1, -2)
    re_BDAN, im_BDAN = (back_BDAS @ fine_DSM).chunk(2, -1)
    last_BDN = (torch.complex(re_BDAN, im_BDAN) * coarse_DNA.transpose(-1, -2)).sum(-2)
    if state_BDN is None:
        return last_BDN
    length = torch.full((1,), L, device=x_BDL.device)
    return last_BDN + found.powers(length)[..., 0] * state_BDN
