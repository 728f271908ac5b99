"""A fixed number of rows per expert. DROPS the assignments that find their expert full."""

# C rows per expert
from __future__ import annotations

import math

import torch
from torch import Tensor

from steplab.kernels.experts import ExpertWeights, GroupedMatmul
from steplab.kernels.experts._activation import activate
from steplab.kernels.experts._sorting import rank_assignments

FACTOR = 1.25  # rows per expert over those of a perfectly balanced routing


def capacity(assignments: int, experts: int) -> int:
    """Return the rows per expert: FACTOR times the balanced number, rounded up to 8."""
    return 8 * math.ceil(FACTOR * assignments / experts / 8)


def kept_assignments(experts_TK: Tensor, experts: int) -> Tensor:
    """Return (T, K) bool: the first C assignments of every expert, in token order."""
    limit = capacity(experts_TK.numel(), experts)
    return rank_assignments(experts_TK, experts) < limit


def experts(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    experts: ExpertWeights,
    matmul: GroupedMatmul,
) -> tuple[Tensor, Tensor]:
    """Return (output_TD, share of assignments dropped)."""
    T, K = experts_TK.shape
    E = experts.w_in_EFD.shape[0]
    C = capacity(T * K, E)
    rank_TK = rank_assignments(experts_TK, E)
    kept_TK = rank_TK < C
    # One slot beyond the last takes everything that is dropped; it reads and gives zero.
    slot_TK = torch.where(kept_TK, experts_TK * C + rank_TK, E * C)
    tokens_TK = torch.arange(T, device=x_TD.device)[:, None].expand(T, K)
    token_S = torch.full((E * C + 1,), T, device=x_TD.device)
    token_S = token_S.scatter(0, slot_TK.flatten(), tokens_TK.flatten())[:-1]
    x_ECD = _with_zero_row(x_TD)[token_S].view(E, C, -1)
    z_ECF = torch.bmm(x_ECD, experts.w_in_EFD.transpose(-2, -1))
    y_ECD = torch.bmm(activate(z_ECF, experts.activation), experts.w_out_EDF.transpose(-2, -1))
    y_TKD = _with_zero_row(y_ECD.flatten(0, 1))[slot_TK]
    out_TD = (y_TKD * weights_TK[..., None]).sum(1).to(x_TD.dtype)
    return out_TD, 1 - kept_TK.to(weights_TK.dtype).mean()


def _with_zero_row(rows: Tensor) -> Tensor:
    return torch.cat([rows, rows.new_zeros(1, rows.shape[-1])])
