"""A product with a matrix of weights: x w^T, plus a bias if there is one.

`reference` is torch's own. `fp8` multiplies in e4m3, forward and for the input's gradient. Every
implementation offers `projection(x, w, bias)` and, unless it takes everything, `refuse(x, w)`.
"""

# T rows, D width, N outputs
from __future__ import annotations

from torch import Tensor

from steplab.kernels.dispatch import load_all, select

IMPLS = load_all("projection")
PREFERENCE = ("reference",)


def choose(impl: str, x: Tensor, w_ND: Tensor) -> str:
    """Return the implementation to run; `auto` is torch's own."""
    return select("projection", IMPLS, PREFERENCE, impl, x, w_ND)


def projection(impl: str, x: Tensor, w_ND: Tensor, bias_N: Tensor | None) -> Tensor:
    """Map (..., D) to (..., N) by exactly the implementation named (not `auto`)."""
    out: Tensor = IMPLS[impl].projection(x, w_ND, bias_N)
    return out
