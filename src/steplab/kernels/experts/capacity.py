"""A fixed number of rows per expert. DROPS the assignments that find their expert full."""

# C rows per expert
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from steplab.kernels.activation.reference import activate
from steplab.kernels.experts import ExpertWeights, GroupedMatmul, RoutedTokens
from steplab.kernels.experts._rows import rank_assignments

NOT_TUNED = "tokens that find their expert full go without it"
FACTOR = 1.25  # rows per expert over those of a perfectly balanced routing


def capacity(assignments: int, experts: int) -> int:
    """Return the rows per expert: FACTOR times the balanced number, rounded up to 8."""
    return 8 * math.ceil(FACTOR * assignments / experts / 8)


def kept_assignments(experts_TK: Tensor, experts: int) -> Tensor:
    """Return (T, K) bool: the first C assignments of every expert, in token order."""
    limit = capacity(experts_TK.numel(), experts)
    return rank_assignments(experts_TK, experts) < limit


def refuse(x_TD: Tensor, experts: ExpertWeights) -> str:
    """Return why it cannot run, or ""."""
    return "" if x_TD.shape[0] else "needs at least one token"


def experts(
    tokens: RoutedTokens, experts: ExpertWeights, matmul: GroupedMatmul
) -> tuple[Tensor, Tensor]:
    """Return (output_TD, share of assignments dropped)."""
    x_TD, weights_TK, experts_TK = tokens
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
    x_ECD = take(x_TD, token_S, slot_TK).view(E, C, -1)
    z_ECF = torch.bmm(x_ECD, experts.w_in_EFD.transpose(-2, -1))
    y_ECD = torch.bmm(activate(z_ECF, experts.activation), experts.w_out_EDF.transpose(-2, -1))
    # Every slot has one assignment, so the rows given back are summed over nothing but it.
    number_TK = torch.arange(T * K, device=x_TD.device).view(T, K)
    assignment_S1 = torch.full((E * C + 1,), T * K, device=x_TD.device)
    assignment_S1 = assignment_S1.scatter(0, slot_TK.flatten(), number_TK.flatten())[:-1, None]
    y_TKD = take(y_ECD.flatten(0, 1), slot_TK.flatten(), assignment_S1).view(T, K, -1)
    out_TD = (y_TKD * weights_TK[..., None]).sum(1).to(x_TD.dtype)
    return out_TD, 1 - kept_TK.to(weights_TK.dtype).mean()


class Take(torch.autograd.Function):
    """Rows by index, where the one beyond the last is zero; the gradient is gathered likewise.

    Left to autograd it would be an index_put that accumulates: a sort, or atomics.
    """

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, number_M: Tensor, targets_NJ: Tensor) -> Tensor:
        """Return (M, D). `targets_NJ` says which of the M rows each row became, M for none."""
        ctx.save_for_backward(targets_NJ)
        return _with_zero_row(rows_ND)[number_M]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Add up what came back from where each row went."""
        (targets_NJ,) = ctx.saved_tensors
        return _with_zero_row(gradients[0])[targets_NJ].sum(1), None, None


def take(rows_ND: Tensor, number_M: Tensor, targets_NJ: Tensor) -> Tensor:
    """Return (M, D)."""
    out_MD: Tensor = Take.apply(rows_ND, number_M, targets_NJ)
    return out_MD


def _with_zero_row(rows: Tensor) -> Tensor:
    return torch.cat([rows, rows.new_zeros(1, rows.shape[-1])])
