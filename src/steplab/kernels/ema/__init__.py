"""ComplexEMA: each of D channels runs through N complex exponential moving averages.

    g_t = q g_{t-1} + x_t        q = rho e^(i phi), |q| <= 1, one per channel and mode
    y_t = Re(sum over modes of c g_t) + omega x_t

x and y are (B, L, D). The state g is (B, 2, N, D): real and imaginary part. The moving average
proper, sigmoid(alpha) g, is never needed: its factor is part of the read-out c. Every
implementation file offers `ema(x, parameters, state, wants_last)`, which returns y and the last
state or None, and `refuse(x, parameters)`, which returns the reason why it cannot, or "".
"""

# B batch, L steps of time, D channels, N modes of each
from __future__ import annotations

from torch import Tensor

from steplab.errors import UserError
from steplab.kernels.ema._parameters import Parameters
from steplab.kernels.impl import AUTO, impls, load, select

# Loaded once, so that torch.compile traces plain dictionary look-ups.
IMPLS = {name: load("ema", name) for name in impls("ema")}
SHORT = 32  # steps up to which a loop costs less than two Fourier transforms


def choose(
    impl: str, x_BLD: Tensor, parameters: Parameters, state_B2ND: Tensor | None = None
) -> str:
    """Return the implementation to run. `auto`: scan on a GPU, else by length."""
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
    parameters: Parameters,
    state_B2ND: Tensor | None = None,
    wants_last: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return (y_BLD, last state or None) by exactly the implementation named (not `auto`)."""
    if x_BLD.shape[1] == 0:  # no step to take, whoever was to take it
        impl = "sequential"
    found: tuple[Tensor, Tensor | None] = IMPLS[impl].ema(x_BLD, parameters, state_B2ND, wants_last)
    return found
