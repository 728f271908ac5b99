"""ComplexEMA: each of D channels runs through N complex exponential moving averages.

    g_t = q g_{t-1} + x_t        q = rho e^(i phi), |q| <= 1, one per channel and mode
    y_t = Re(sum over modes of c g_t) + omega x_t

x and y are (B, L, D). The state g is (B, 2, N, D): real and imaginary part. The moving average
proper, sigmoid(alpha) g, is never needed: its factor is part of the read-out c. Every
implementation offers `ema(x, parameters, state, wants_last)`, which returns y and the last state or
None, and, unless it takes everything, `refuse(x, parameters)`.
"""

# B batch, L steps of time, D channels, N modes of each
from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from steplab.core.errors import UserError
from steplab.kernels.dispatch import AUTO, load_all, select


class EMAParameters(NamedTuple):
    """What is trained, all real. Logits may have any value: |q| is at most 1."""

    alpha_DN: Tensor  # logit of the input's share
    delta_DN: Tensor  # logit of how much of that share is forgotten
    theta_D: Tensor  # logit of a channel's base angle
    gamma_DN2: Tensor  # read-out, real and imaginary part
    omega_D: Tensor  # share of the input that is added to the output


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

        Magnitude and angle separately, in fp64: in fp32 the angle would be off by 2e-7 per step.
        """
        exponents_E = exponents_E.to(self.rho_DN.dtype)
        rho_DNE = self.rho_DN[..., None] ** exponents_E
        return torch.polar(rho_DNE, self.phi_DN[..., None] * exponents_E)


def coefficients(parameters: EMAParameters) -> Coefficients:
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
    """Return a stored state as complex (B, D, N)."""
    re_BND, im_BND = state_B2ND.unbind(1)
    return torch.complex(re_BND, im_BND).transpose(1, 2)


def stored_state(state_BDN: Tensor) -> Tensor:
    """Return a complex (B, D, N) as it is stored: real and imaginary part, (B, 2, N, D)."""
    return torch.view_as_real(state_BDN).permute(0, 3, 2, 1).contiguous()


# After the types above, which the implementations import.
IMPLS = load_all("ema")
SHORT = 32  # steps up to which a loop costs less than two Fourier transforms


def choose(
    impl: str, x_BLD: Tensor, parameters: EMAParameters, state_B2ND: Tensor | None = None
) -> str:
    """Return the implementation to run. `auto` takes the scan on a GPU, else decides by length."""
    (B, _, D), N = x_BLD.shape, parameters.alpha_DN.shape[1]
    if state_B2ND is not None and state_B2ND.shape != (B, 2, N, D):
        raise UserError(
            f"The state has the shape {tuple(state_B2ND.shape)}, not {(B, 2, N, D)}.",
            "Take the state that the same model returned for the same batch.",
        )
    if impl == AUTO and IMPLS["scan"].refuse(x_BLD, parameters):
        return "sequential" if x_BLD.shape[1] <= SHORT else "fft"
    return select("ema", IMPLS, ("scan",), impl, x_BLD, parameters)


def ema(
    impl: str,
    x_BLD: Tensor,
    parameters: EMAParameters,
    state_B2ND: Tensor | None = None,
    wants_last: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return (y_BLD, last state or None) by exactly the implementation named (not `auto`)."""
    if x_BLD.shape[1] == 0:  # no step to take
        impl = "sequential"
    found: tuple[Tensor, Tensor | None] = IMPLS[impl].ema(x_BLD, parameters, state_B2ND, wants_last)
    return found
