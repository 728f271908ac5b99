"""Like `fused`, with every product in e4m3: rows rounded by the passes that touch them anyway.

The units sum weight gradients over multiples of 16 rows, so others are followed by rows of zeros.
"""

# T rows, D width, F inner width
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from steplab.kernels import e4m3_network
from steplab.kernels.activation import RowWeights
from steplab.kernels.e4m3_network import Groups, Kept, Needs
from steplab.kernels.e4m3_passes import MULTIPLE
from steplab.kernels.triton_runtime import refuse_device

NEEDS_GPU = True
NOT_TUNED = "It rounds to 8 bits, which precision=fp8 asks for."


def refuse(x_TD: Tensor, w_in_FD: Tensor, w_out_DF: Tensor) -> str:
    """Return why it cannot run, or ""."""
    if x_TD.ndim != 2:
        return f"needs rows of one matrix, not {x_TD.ndim} axes"
    gated = w_in_FD.shape[0] != w_out_DF.shape[1]
    D, inner = w_out_DF.shape
    activation = "swiglu" if gated else "gelu"
    return refuse_device(x_TD) or e4m3_network.refuse(x_TD, D, inner, activation)


def feed_forward(
    x_TD: Tensor, w_in_FD: Tensor, w_out_DF: Tensor, activation: str, weights_T1: Tensor | None
) -> Tensor:
    """Return (T, D)."""
    rows = x_TD.shape[0]
    missing = -rows % MULTIPLE
    if missing:
        x_TD = F.pad(x_TD, (0, 0, 0, missing))
        weights_T1 = None if weights_T1 is None else F.pad(weights_T1, (0, 0, 0, missing))
    out_TD: Tensor = feed_forward_fp8(x_TD, w_in_FD, w_out_DF, weights_T1)[0]
    return out_TD[:rows] if missing else out_TD


@torch.library.custom_op("steplab::feed_forward_fp8", mutates_args=())
def feed_forward_fp8(
    x_TD: Tensor, w_in_FD: Tensor, w_out_DF: Tensor, weights_T1: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (output_TD, z_TF in e4m3, scales_3T)."""
    y_TD, kept = e4m3_network.forward(x_TD, w_in_FD, w_out_DF, _rows(weights_T1))
    return y_TD, *kept


@feed_forward_fp8.register_fake
def _(
    x_TD: Tensor, w_in_FD: Tensor, w_out_DF: Tensor, weights_T1: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    T = x_TD.shape[0]
    z_TF = x_TD.new_empty(T, w_in_FD.shape[0], dtype=torch.float8_e4m3fn)
    return x_TD.new_empty(x_TD.shape), z_TF, x_TD.new_empty(3, T, dtype=torch.float32)


@torch.library.custom_op("steplab::feed_forward_fp8_backward", mutates_args=())
def feed_forward_fp8_backward(
    dout_TD: Tensor,
    x_TD: Tensor,
    w_in_FD: Tensor,
    w_out_DF: Tensor,
    weights_T1: Tensor | None,
    z_TF: Tensor,
    scales_3T: Tensor,
    need_dx: bool,
    need_dw_in: bool,
    need_dw_out: bool,
) -> list[Tensor]:
    """Return the gradients of x, of both matrices and, where there are any, of the weights.

    Those of x and the matrices are empty where not needed.
    """
    *found, dweights_T = e4m3_network.backward(
        dout_TD, x_TD, w_in_FD, w_out_DF, _rows(weights_T1), Kept(z_TF, scales_3T),
        Needs(need_dx, need_dw_in, need_dw_out),
    )  # fmt: skip
    if weights_T1 is not None and dweights_T is not None:
        found.append(dweights_T[:, None].to(weights_T1.dtype))
    return found


@feed_forward_fp8_backward.register_fake
def _(dout_TD: Tensor, *inputs: Any) -> list[Tensor]:
    needs = (*inputs[-3:], inputs[3] is not None)
    found = zip(inputs[:4], needs, strict=True)
    return [t.new_empty(t.shape if need else 0) for t, need in found if t is not None]


def _rows(weights_T1: Tensor | None) -> Groups:
    return Groups(None if weights_T1 is None else RowWeights(weights_T1.flatten()))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # no zeros in the size of what is kept
    ctx.save_for_backward(*inputs, *output[1:])


def _differentiate(ctx: Any, dout_TD: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if dout_TD is None:
        return (None,) * 4
    needs = ctx.needs_input_grad
    found = feed_forward_fp8_backward(dout_TD, *ctx.saved_tensors, *needs[:3])
    gradients = [g if need else None for g, need in zip(found, needs, strict=False)]
    return *gradients, *[None] * (4 - len(gradients))


feed_forward_fp8.register_autograd(_differentiate, setup_context=_keep)
