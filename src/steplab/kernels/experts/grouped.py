"""Dropless with static shapes: rows sorted by expert, two grouped products, gathers both ways.

Left to autograd, the backward of `x[token_R]` is an index_put that accumulates: a sort in eager
mode, atomics when compiled. With the inverse map it is a gather and a sum over K.
"""

# T tokens, K chosen experts, D width, R = T * K rows
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from steplab.kernels.activation.reference import activate
from steplab.kernels.experts import ExpertWeights, GroupedMatmul, RoutedTokens
from steplab.kernels.experts._rows import sort_rows


class Gather(torch.autograd.Function):
    """x_TD -> x_RD: each token is copied to its K rows."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
        """Return x_TD[token_R]."""
        ctx.save_for_backward(row_TK)
        return x_TD[token_R]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Add up the gradients of a token's K rows."""
        (row_TK,) = ctx.saved_tensors
        return gradients[0][row_TK].sum(1), None, None


class Combine(torch.autograd.Function):
    """(y_RD, weights_TK) -> out_TD: a token's K rows, weighted and added in the weights' dtype."""

    @staticmethod
    def forward(
        ctx: Any, y_RD: Tensor, weights_TK: Tensor, token_R: Tensor, row_TK: Tensor
    ) -> Tensor:
        """Return sum over k of weights[t, k] * y[row[t, k]], in the dtype of the weights.

        The cast to the dtype of y is the caller's: with a `.to` that changes nothing as the last
        op here, torch 2.11 compiles this function to one whose gradients are all zero.
        """
        ctx.save_for_backward(y_RD, weights_TK, token_R, row_TK)
        return (y_RD[row_TK] * weights_TK[..., None]).sum(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Gradients of the rows, and of the weights as inner products."""
        (dout_TD,) = gradients
        y_RD, weights_TK, token_R, row_TK = ctx.saved_tensors
        weight_R = torch.empty_like(weights_TK.flatten()).scatter_(
            0, row_TK.flatten(), weights_TK.flatten()
        )
        dy_RD = (dout_TD[token_R] * weight_R[:, None]).to(y_RD.dtype)
        products_TKD = y_RD[row_TK].to(weights_TK.dtype) * dout_TD[:, None]
        return dy_RD, products_TKD.sum(-1).to(weights_TK.dtype), None, None


def gather(x_TD: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
    """Return (R, D)."""
    out_RD: Tensor = Gather.apply(x_TD, token_R, row_TK)
    return out_RD


def combine(y_RD: Tensor, weights_TK: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
    """Return (T, D) in the dtype of y."""
    out_TD: Tensor = Combine.apply(y_RD, weights_TK, token_R, row_TK)
    return out_TD.to(y_RD.dtype)


def experts(
    tokens: RoutedTokens, experts: ExpertWeights, matmul: GroupedMatmul
) -> tuple[Tensor, Tensor]:
    """Return (output_TD, 0)."""
    x_TD, weights_TK, experts_TK = tokens
    rows = sort_rows(experts_TK, experts.w_in_EFD.shape[0])
    x_RD = gather(x_TD, rows.token_R, rows.row_TK)
    # Stored as (E, out, in) and transposed here: both products and both weight gradients then
    # have the layout in which torch's op needs no alignment of the groups.
    z_RF = matmul(x_RD, experts.w_in_EFD.transpose(-2, -1), rows.offsets_E)
    h_RF = activate(z_RF, experts.activation)
    y_RD = matmul(h_RF, experts.w_out_EDF.transpose(-2, -1), rows.offsets_E)
    return combine(y_RD, weights_TK, rows.token_R, rows.row_TK), weights_TK.new_zeros(())
