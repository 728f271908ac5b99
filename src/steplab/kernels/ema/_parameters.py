"""The stored parameters of a ComplexEMA, and the coefficients that they stand for."""

# D channels, N modes of each
from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Parameters(NamedTuple):
    """What is trained; all real. Logits may have any value: |q| is at most 1."""

    alpha_DN: Tensor  # logit of the input's share
    delta_DN: Tensor  # logit of how much of that share is forgotten
    theta_D: Tensor  # logit of a channel's base angle
    gamma_DN2: Tensor  # read-out, real and imaginary part
    omega_D: Tensor  # share of the input that passes by


class Coefficients(NamedTuple):
    """q = rho e^(i phi), by which a state shrinks and turns, and its read-out c; in fp64."""

    rho_DN: Tensor
    phi_DN: Tensor
    read_DN: Tensor  # complex

    @property
    def q_DN(self) -> Tensor:
        """The factor of one step."""
        return torch.polar(self.rho_DN, self.phi_DN)

    def powers(self, exponents_E: Tensor) -> Tensor:
        """Return q to each of the integer exponents, (D, N, E) complex; 0 to the power of 0 is 1.

        Magnitude and angle apart, in fp64: in fp32 the angle would be off by 2e-7 per step.
        """
        exponents_E = exponents_E.to(self.rho_DN.dtype)
        rho_DNE = self.rho_DN[..., None] ** exponents_E
        return torch.polar(rho_DNE, self.phi_DN[..., None] * exponents_E)


def coefficients(parameters: Parameters) -> Coefficients:
    """Return the coefficients, built in fp64 whatever the parameters are stored in."""
    alpha_DN, delta_DN, theta_D, gamma_DN2 = (x.double() for x in parameters[:4])
    N = alpha_DN.shape[1]
    share_DN = alpha_DN.sigmoid()
    rho_DN = 1 - share_DN * delta_DN.sigmoid()
    mode_N = torch.arange(1, N + 1, dtype=torch.float64, device=alpha_DN.device)
    phi_DN = theta_D.sigmoid()[:, None] * (mode_N * (2 * math.pi / N))
    read_DN = torch.view_as_complex(gamma_DN2.contiguous()) * share_DN / math.sqrt(N)
    return Coefficients(rho_DN, phi_DN, read_DN)


def complex_state(state_B2ND: Tensor) -> Tensor:
    """Return a state as complex (B, D, N)."""
    re_BND, im_BND = state_B2ND.unbind(1)
    return torch.complex(re_BND, im_BND).transpose(1, 2)


def stored_state(state_BDN: Tensor) -> Tensor:
    """Return a complex (B, D, N) as it is stored: real and imaginary part, (B, 2, N, D)."""
    return torch.view_as_real(state_BDN).permute(0, 3, 2, 1).contiguous()
