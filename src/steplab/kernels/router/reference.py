"""The definition."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def router(
    x_TD: Tensor, weight_ED: Tensor, gate_1D: Tensor, chosen: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (probabilities_TE, weights_TK, experts_TK, gate_T1)."""
    dtype = torch.promote_types(x_TD.dtype, torch.float32)
    x_TD = x_TD.to(dtype)
    probabilities_TE = F.linear(x_TD, weight_ED.to(dtype)).softmax(-1)
    weights_TK, experts_TK = probabilities_TE.topk(chosen, dim=-1)
    return probabilities_TE, weights_TK, experts_TK, F.linear(x_TD, gate_1D.to(dtype)).sigmoid()
