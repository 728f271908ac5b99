"""The definition: two products by torch, which autocast may round."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from steplab.kernels.activation.reference import activate


def feed_forward(
    x_TD: Tensor, w_in_FD: Tensor, w_out_DF: Tensor, activation: str, weights_T1: Tensor | None
) -> Tensor:
    """Return (T, D) in the dtype of the products."""
    out_TD = F.linear(activate(F.linear(x_TD, w_in_FD), activation), w_out_DF)
    return out_TD if weights_T1 is None else (out_TD * weights_T1).to(out_TD.dtype)
