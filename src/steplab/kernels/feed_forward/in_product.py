"""Like `fused`, with the activation and its derivative in the kernels of the products before."""

from __future__ import annotations

import torch
from torch import Tensor

from steplab.kernels.activation._in_product import IN_PRODUCT, refuse_layer
from steplab.kernels.feed_forward import fused
from steplab.kernels.triton_runtime import refuse_gluon

NEEDS_GPU = True


def refuse(x_TD: Tensor, w_in_FD: Tensor, w_out_DF: Tensor) -> str:
    """Return why it cannot run, or ""."""
    if x_TD.dtype != torch.bfloat16:
        return f"needs bf16, not {x_TD.dtype}"
    reason = fused.refuse(x_TD, w_in_FD, w_out_DF) or refuse_layer(*w_out_DF.shape)
    return reason or refuse_gluon(x_TD)


def feed_forward(
    x_TD: Tensor, w_in_FD: Tensor, w_out_DF: Tensor, activation: str, weights_T1: Tensor | None
) -> Tensor:
    """Return (T, D)."""
    return fused.feed_forward(x_TD, w_in_FD, w_out_DF, IN_PRODUCT[activation], weights_T1)
