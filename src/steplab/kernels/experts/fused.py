"""Like `grouped`, in hand-written passes that keep only the tokens and z for the backward.

Forward and gradient are one op each, so what is kept between them is what is named here. Of the
wide rows that is z, before the activation: h is recomputed in the pass that reads z anyway, tokens
are gathered again, and y is not needed, since d(weight) = <d_out w_out, act(z)>.
"""

# T tokens, K chosen experts, E experts, D width, F inner width (2F in z for swiglu), R = T * K rows
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from steplab.kernels import activation as activation_op
from steplab.kernels.activation._in_product import (
    IN_PRODUCT,
    backward_in_product,
    forward_in_product,
)
from steplab.kernels.experts import ExpertWeights, GroupedMatmul, RoutedTokens
from steplab.kernels.experts._rows import gather_rows, place_rows, sum_rows
from steplab.kernels.grouped_mm import product, weight_gradient
from steplab.kernels.triton_runtime import refuse_device

NEEDS_GPU = True


@torch.library.custom_op("steplab::fused_experts", mutates_args=())
def fused_experts(
    x_TD: Tensor,
    weights_TK: Tensor,
    w_in_EFD: Tensor,
    w_out_EDF: Tensor,
    row_TK: Tensor,
    source_R: Tensor,
    offsets_E: Tensor,
    activation: str,
    matmul: str,
) -> tuple[Tensor, Tensor]:
    """Return (output_TD, z_RF); `matmul` names the grouped product."""
    x_RD = gather_rows(x_TD, source_R, row_TK.shape[1])
    # Weighted here and not after the second product: one factor in a pass that is there anyway.
    weights = activation_op.RowWeights(weights_TK.flatten(), source_R)
    if activation in IN_PRODUCT.values():
        z_RF, h_RF = forward_in_product(x_RD, w_in_EFD, offsets_E, activation, weights)
    else:
        z_RF = product(matmul, x_RD, w_in_EFD.transpose(-2, -1), offsets_E)
        h_RF = activation_op.forward(activation_op.choose(z_RF), z_RF, activation, weights)
    del x_RD
    y_RD = product(matmul, h_RF, w_out_EDF.transpose(-2, -1), offsets_E)
    del h_RF
    return sum_rows(y_RD, row_TK), z_RF


@fused_experts.register_fake
def _(
    x_TD: Tensor, weights_TK: Tensor, w_in_EFD: Tensor, *rest: Any, **named: Any
) -> tuple[Tensor, Tensor]:
    z_RF = x_TD.new_empty(weights_TK.numel(), w_in_EFD.shape[1])
    return x_TD.new_empty(x_TD.shape), z_RF


@torch.library.custom_op("steplab::fused_experts_backward", mutates_args=())
def fused_experts_backward(
    dout_TD: Tensor,
    x_TD: Tensor,
    weights_TK: Tensor,
    w_in_EFD: Tensor,
    w_out_EDF: Tensor,
    row_TK: Tensor,
    source_R: Tensor,
    offsets_E: Tensor,
    z_RF: Tensor,
    activation: str,
    matmul: str,
    need_dx: bool,
    need_dw_in: bool,
    need_dw_out: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, the weights and both matrices; empty where not needed."""
    chosen = row_TK.shape[1]
    dout_RD = gather_rows(dout_TD, source_R, chosen)
    weights = activation_op.RowWeights(weights_TK.flatten(), source_R)
    if activation in IN_PRODUCT.values():
        dz_RF, h_RF, dweights_R = backward_in_product(
            dout_RD, w_out_EDF, offsets_E, z_RF, activation, weights
        )
    else:
        dh_RF = product(matmul, dout_RD, w_out_EDF, offsets_E)
        impl = activation_op.choose(z_RF)
        dz_RF, h_RF, dweights_R = activation_op.backward(impl, z_RF, dh_RF, activation, weights)
        del dh_RF
    assert dweights_R is not None
    dw_out_EDF, dw_in_EFD, dx_TD = (t.new_empty(0) for t in (w_out_EDF, w_in_EFD, x_TD))
    if need_dw_out:
        dw_out_EDF = weight_gradient(matmul, dout_RD, h_RF, offsets_E)
    del dout_RD, h_RF  # 1 GiB with 65,536 tokens of width 768, which the next products need
    if need_dw_in:
        x_RD = gather_rows(x_TD, source_R, chosen)
        dw_in_EFD = weight_gradient(matmul, dz_RF, x_RD, offsets_E)
        del x_RD
    if need_dx:
        dx_RD = product(matmul, dz_RF, w_in_EFD, offsets_E)
        del dz_RF
        dx_TD = sum_rows(dx_RD, row_TK)
    dweights_TK = dweights_R.view_as(weights_TK).to(weights_TK.dtype)
    return dx_TD, dweights_TK, dw_in_EFD, dw_out_EDF


@fused_experts_backward.register_fake
def _(dout_TD: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    need_dx, *need_matrices = inputs[-3:]
    pairs = zip(inputs[:4], (need_dx, True, *need_matrices), strict=True)
    return tuple(tensor.new_empty(tensor.shape if need else 0) for tensor, need in pairs)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.activation, ctx.matmul = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros in the size of what is kept
    ctx.save_for_backward(*tensors, output[1])


def _differentiate(ctx: Any, dout_TD: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dout_TD is None:
        return (None,) * 9
    kept = (*ctx.saved_tensors, ctx.activation, ctx.matmul)
    need_dx, _, *need_matrices = needs = ctx.needs_input_grad[:4]
    found = fused_experts_backward(dout_TD, *kept, need_dx, *need_matrices)
    gradients = (g if need else None for g, need in zip(found, needs, strict=True))
    return *gradients, None, None, None, None, None


fused_experts.register_autograd(_differentiate, setup_context=_keep)


def refuse(x_TD: Tensor, experts: ExpertWeights) -> str:
    """Return why it cannot run, or ""."""
    reason = refuse_device(x_TD)
    if reason:
        return reason
    # What torch's grouped product needs to run without waiting for the host.
    if x_TD.is_cuda and torch.cuda.get_device_capability(x_TD.device) < (9, 0):
        return "needs compute capability 9.0 or newer"
    if x_TD.dtype != torch.bfloat16:
        return f"needs bf16, not {x_TD.dtype}"
    D, F = experts.w_out_EDF.shape[1:]
    if D % 8 or F % 8:
        return f"needs widths in multiples of 8, not {D} and {F}"
    return ""


def experts(
    tokens: RoutedTokens, experts: ExpertWeights, matmul: GroupedMatmul
) -> tuple[Tensor, Tensor]:
    """Return (output_TD, 0)."""
    x_TD, weights_TK, experts_TK = tokens
    w_in_EFD, w_out_EDF, activation = experts
    product = matmul.choose(x_TD, w_in_EFD.transpose(-2, -1))
    placed = place_rows(experts_TK, w_in_EFD.shape[0])
    out_TD, _ = fused_experts(x_TD, weights_TK, w_in_EFD, w_out_EDF, *placed, activation, product)
    return out_TD, weights_TK.new_zeros(())
