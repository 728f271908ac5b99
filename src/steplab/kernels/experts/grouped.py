"""Dropless with static shapes: rows sorted by expert, two grouped products, gathers both ways."""

from __future__ import annotations

from torch import Tensor

from steplab.kernels.activation.reference import activate
from steplab.kernels.experts import ExpertWeights, GroupedMatmul
from steplab.kernels.experts._permute import combine, gather
from steplab.kernels.experts._sorting import sort_rows


def refuse(x_TD: Tensor, experts: ExpertWeights) -> str:
    """Return why it cannot run, or "": the grouped product takes what it is given."""
    return ""


def experts(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    experts: ExpertWeights,
    matmul: GroupedMatmul,
) -> tuple[Tensor, Tensor]:
    """Return (output_TD, 0)."""
    rows = sort_rows(experts_TK, experts.w_in_EFD.shape[0])
    x_RD = gather(x_TD, rows.token_R, rows.row_TK)
    # Stored as (E, out, in) and transposed here: both products and both weight gradients then
    # have the layout in which torch's op needs no alignment of the groups.
    z_RF = matmul(x_RD, experts.w_in_EFD.transpose(-2, -1), rows.offsets_E)
    h_RF = activate(z_RF, experts.activation)
    y_RD = matmul(h_RF, experts.w_out_EDF.transpose(-2, -1), rows.offsets_E)
    return combine(y_RD, weights_TK, rows.token_R, rows.row_TK), weights_TK.new_zeros(())
