"""The definition, expert by expert. Shapes depend on the routing, so every expert waits for it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from steplab.kernels.activation.reference import activate
from steplab.kernels.experts import ExpertWeights, GroupedMatmul, RoutedTokens


def experts(
    tokens: RoutedTokens, experts: ExpertWeights, matmul: GroupedMatmul
) -> tuple[Tensor, Tensor]:
    """Return (output_TD, 0)."""
    x_TD, weights_TK, experts_TK = tokens
    out_TD = torch.zeros_like(x_TD, dtype=weights_TK.dtype)
    for index in range(experts.w_in_EFD.shape[0]):
        token_N, choice_N = (experts_TK == index).nonzero(as_tuple=True)
        z_NF = F.linear(x_TD[token_N], experts.w_in_EFD[index])
        y_ND = F.linear(activate(z_NF, experts.activation), experts.w_out_EDF[index])
        weighted_ND = y_ND * weights_TK[token_N, choice_N, None]
        out_TD = out_TD.index_add(0, token_N, weighted_ND.to(out_TD.dtype))
    return out_TD.to(x_TD.dtype), weights_TK.new_zeros(())
