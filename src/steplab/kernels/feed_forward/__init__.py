"""A two-matrix network for every row: act(x w_in^T) w_out^T, times a weight per row if given.

`reference` is the definition. `fused` keeps x and the rows before the activation, and nothing else;
`in_product` is `fused` with the activation inside two of the products, `in_product_kept` keeps the
rows behind it as well. Every implementation offers `feed_forward(...)` and, unless it takes
everything, `refuse(x, w_in, w_out)`.
"""

# T rows, D width, F inner width (2F in w_in for swiglu, the gate's rows first)
from __future__ import annotations

from torch import Tensor

from steplab.kernels.dispatch import load_all, select

IMPLS = load_all("feed_forward")
PREFERENCE = ("in_product", "fused", "reference")


def choose(impl: str, x_TD: Tensor, w_in_FD: Tensor, w_out_DF: Tensor) -> str:
    """Return the implementation to run; `auto` is the fused one wherever it can run."""
    return select("feed_forward", IMPLS, PREFERENCE, impl, x_TD, w_in_FD, w_out_DF)


def feed_forward(
    impl: str,
    x_TD: Tensor,
    w_in_FD: Tensor,
    w_out_DF: Tensor,
    activation: str,
    weights_T1: Tensor | None = None,
) -> Tensor:
    """Return (T, D) by exactly the implementation named (not `auto`)."""
    out_TD: Tensor = IMPLS[impl].feed_forward(x_TD, w_in_FD, w_out_DF, activation, weights_T1)
    return out_TD
