"""Forward and the gradient of x in e4m3, rows rounded in one pass each; that of w in bf16.

The gradient of w sums over rows, so both of its factors would have to be written transposed as
well. At a width of 768 that costs what the product would save.
"""

# T rows, D width, N outputs
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from steplab.kernels.e4m3 import product
from steplab.kernels.e4m3_passes import quantize_columns, quantize_rows, refuse_widths
from steplab.kernels.triton_runtime import refuse_device

NEEDS_GPU = True
NOT_TUNED = "It rounds to 8 bits, which precision=fp8 asks for."


def refuse(x: Tensor, w_ND: Tensor) -> str:
    """Return why it cannot run, or ""."""
    return refuse_device(x) or refuse_widths(x, *reversed(w_ND.shape))


def projection(x: Tensor, w_ND: Tensor, bias_N: Tensor | None) -> Tensor:
    """Map (..., D) to (..., N)."""
    return projection_fp8(x.flatten(0, -2), w_ND, bias_N).view(*x.shape[:-1], w_ND.shape[0])


@torch.library.custom_op("steplab::projection_fp8", mutates_args=())
def projection_fp8(x_TD: Tensor, w_ND: Tensor, bias_N: Tensor | None) -> Tensor:
    """Return (T, N)."""
    return product(quantize_rows(x_TD), quantize_rows(w_ND), None, x_TD.dtype, bias_N)


@projection_fp8.register_fake
def _(x_TD: Tensor, w_ND: Tensor, bias_N: Tensor | None) -> Tensor:
    return x_TD.new_empty(x_TD.shape[0], w_ND.shape[0])


@torch.library.custom_op("steplab::projection_fp8_backward", mutates_args=())
def projection_fp8_backward(
    dout_TN: Tensor, x_TD: Tensor, w_ND: Tensor, need_dx: bool, need_dw: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and w; empty where not needed."""
    dx_TD, dw_ND = x_TD.new_empty(0), w_ND.new_empty(0)
    if need_dx:
        dx_TD = product(quantize_rows(dout_TN), quantize_columns(w_ND), None, x_TD.dtype)
    if need_dw:
        dw_ND = weight_gradient(dout_TN, x_TD)
    return dx_TD, dw_ND


def weight_gradient(dout_TN: Tensor, x_TD: Tensor) -> Tensor:
    """Return (N, D), of what was not rounded."""
    return dout_TN.T @ x_TD


@projection_fp8_backward.register_fake
def _(
    dout_TN: Tensor, x_TD: Tensor, w_ND: Tensor, need_dx: bool, need_dw: bool
) -> tuple[Tensor, Tensor]:
    return x_TD.new_empty(x_TD.shape if need_dx else 0), w_ND.new_empty(
        w_ND.shape if need_dw else 0
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _differentiate(ctx: Any, dout_TN: Tensor) -> tuple[Tensor | None, ...]:
    need_dx, need_dw, need_dbias = ctx.needs_input_grad
    dx_TD, dw_ND = projection_fp8_backward(dout_TN, *ctx.saved_tensors, need_dx, need_dw)
    dbias_N = dout_TN.sum(0) if need_dbias else None
    return dx_TD if need_dx else None, dw_ND if need_dw else None, dbias_N


projection_fp8.register_autograd(_differentiate, setup_context=_keep)
