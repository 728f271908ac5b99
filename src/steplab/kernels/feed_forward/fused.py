"""Two products by torch around one-pass activations; x and z are all that the backward gets, and h
where it is asked for (`in_product_kept`).

The weight of a row is applied in the activation. So its gradient does not need the output, and
applying it does not take a pass over the output.
"""

# T rows, D width, F inner width (2F in z for swiglu)
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
from steplab.kernels.triton_runtime import refuse_device

DTYPES = (torch.bfloat16, torch.float16)  # its gelu is accurate to 18 bits, too few for fp32
NEEDS_GPU = True


def refuse(x_TD: Tensor, w_in_FD: Tensor, w_out_DF: Tensor) -> str:
    """Return why it cannot run, or ""."""
    reason = refuse_device(x_TD)
    if reason:
        return reason
    if x_TD.dtype not in DTYPES:
        return f"needs bf16 or fp16, not {x_TD.dtype}"
    if x_TD.ndim != 2:
        return f"needs rows of one matrix, not {x_TD.ndim} axes"
    return ""


def feed_forward(
    x_TD: Tensor,
    w_in_FD: Tensor,
    w_out_DF: Tensor,
    activation: str,
    weights_T1: Tensor | None,
    keeps_h: bool = False,
) -> Tensor:
    """Return (T, D)."""
    inputs = (x_TD, w_in_FD, w_out_DF, weights_T1, activation, keeps_h)
    out_TD: Tensor = fused_feed_forward(*inputs)[0]
    return out_TD


@torch.library.custom_op("steplab::fused_feed_forward", mutates_args=())
def fused_feed_forward(
    x_TD: Tensor,
    w_in_FD: Tensor,
    w_out_DF: Tensor,
    weights_T1: Tensor | None,
    activation: str,
    keeps_h: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (output_TD, z_TF, h_TF); an empty h unless it is to be kept."""
    weights = _weights(weights_T1)
    if activation in IN_PRODUCT.values():
        z_TF, h_TF = forward_in_product(x_TD, w_in_FD[None], None, activation, weights)
    else:
        z_TF = x_TD @ w_in_FD.T
        h_TF = activation_op.forward(activation_op.choose(z_TF), z_TF, activation, weights)
    return h_TF @ w_out_DF.T, z_TF, h_TF if keeps_h else x_TD.new_empty(0)


@fused_feed_forward.register_fake
def _(
    x_TD: Tensor,
    w_in_FD: Tensor,
    w_out_DF: Tensor,
    weights_T1: Tensor | None,
    activation: str,
    keeps_h: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    T = x_TD.shape[0]
    h_TF = x_TD.new_empty((T, w_out_DF.shape[1]) if keeps_h else 0)
    return x_TD.new_empty(x_TD.shape), x_TD.new_empty(T, w_in_FD.shape[0]), h_TF


@torch.library.custom_op("steplab::fused_feed_forward_backward", mutates_args=())
def fused_feed_forward_backward(
    dout_TD: Tensor,
    x_TD: Tensor,
    w_in_FD: Tensor,
    w_out_DF: Tensor,
    weights_T1: Tensor | None,
    z_TF: Tensor,
    kept_TF: Tensor | None,
    activation: str,
    need_dx: bool,
    need_dw_in: bool,
    need_dw_out: bool,
) -> list[Tensor]:
    """Return the gradients of x, of both matrices and, where there are any, of the weights.

    Those of x and the matrices are empty where not needed. `kept_TF`: h, where the forward kept it.
    """
    weights = _weights(weights_T1)
    if activation in IN_PRODUCT.values():
        dz_TF, h_TF, dweights_T = backward_in_product(
            dout_TD, w_out_DF[None], None, z_TF, activation, weights, kept_TF
        )
    else:
        dh_TF = dout_TD @ w_out_DF
        impl = activation_op.choose(z_TF)
        dz_TF, h_TF, dweights_T = activation_op.backward(impl, z_TF, dh_TF, activation, weights)
        del dh_TF
    dw_out_DF = dout_TD.T @ h_TF if need_dw_out else w_out_DF.new_empty(0)
    del h_TF
    dx_TD = dz_TF @ w_in_FD if need_dx else x_TD.new_empty(0)
    dw_in_FD = dz_TF.T @ x_TD if need_dw_in else w_in_FD.new_empty(0)
    gradients = [dx_TD, dw_in_FD, dw_out_DF]
    if weights_T1 is not None and dweights_T is not None:
        gradients.append(dweights_T[:, None].to(weights_T1.dtype))
    return gradients


@fused_feed_forward_backward.register_fake
def _(dout_TD: Tensor, *inputs: Any) -> list[Tensor]:
    needs = (*inputs[-3:], inputs[3] is not None)
    found = zip(inputs[:4], needs, strict=True)
    return [t.new_empty(t.shape if need else 0) for t, need in found if t is not None]


def _weights(weights_T1: Tensor | None) -> activation_op.RowWeights | None:
    return None if weights_T1 is None else activation_op.RowWeights(weights_T1.flatten())


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.activation, keeps_h = inputs
    _, z_TF, h_TF = output
    ctx.mark_non_differentiable(z_TF, h_TF)
    ctx.set_materialize_grads(False)  # no zeros in the size of what is kept
    ctx.save_for_backward(*tensors, z_TF, h_TF if keeps_h else None)


def _differentiate(ctx: Any, dout_TD: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if dout_TD is None:
        return (None,) * 6
    needs = ctx.needs_input_grad[:4]
    found = fused_feed_forward_backward(dout_TD, *ctx.saved_tensors, ctx.activation, *needs[:3])
    gradients = [g if need else None for g, need in zip(found, needs, strict=False)]
    return *gradients, *[None] * (6 - len(gradients))


fused_feed_forward.register_autograd(_differentiate, setup_context=_keep)
