"""Like `in_product`, and h is kept too: the backward need not write it again.

For 2 F bytes a token and layer more memory, the backward of nanoGPT's network (16,384 rows, inner
width 3072) takes 136 us instead of 150 on an H200.
"""

from __future__ import annotations

from torch import Tensor

from steplab.kernels.activation._in_product import IN_PRODUCT
from steplab.kernels.feed_forward import fused
from steplab.kernels.feed_forward.in_product import refuse as refuse

NEEDS_GPU = True


def feed_forward(
    x_TD: Tensor, w_in_FD: Tensor, w_out_DF: Tensor, activation: str, weights_T1: Tensor | None
) -> Tensor:
    """Return (T, D)."""
    inside = IN_PRODUCT[activation]
    return fused.feed_forward(x_TD, w_in_FD, w_out_DF, inside, weights_T1, keeps_h=True)
