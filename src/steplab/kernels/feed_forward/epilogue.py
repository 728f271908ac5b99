"""Like `fused`, with gelu and its derivative in the kernels of the matrix products."""

from __future__ import annotations

from torch import Tensor

from steplab.kernels.feed_forward import fused
from steplab.kernels.grouped_mm._epilogue import IN_PRODUCT, refuse_shape

NOT_TUNED = "no GPU has measured it yet"


def refuse(x_TD: Tensor, w_in_FD: Tensor, w_out_DF: Tensor) -> str:
    """Return why it cannot run, or ""."""
    if w_in_FD.shape[0] != w_out_DF.shape[1]:
        return "needs gelu, not swiglu"
    return fused.refuse(x_TD, w_in_FD, w_out_DF) or refuse_shape(x_TD, *w_out_DF.shape)


def feed_forward(
    x_TD: Tensor, w_in_FD: Tensor, w_out_DF: Tensor, activation: str, weights_T1: Tensor | None
) -> Tensor:
    """Return (T, D)."""
    return fused.feed_forward(x_TD, w_in_FD, w_out_DF, IN_PRODUCT, weights_T1)
