"""Like `fused`, with every product in e4m3: rows rounded by the passes that touch them anyway.

The units want groups of 16 rows and no empty ones, so the rows of an expert are followed by up to
16 rows without a token.
"""

# T tokens, K chosen experts, E experts, D width, F inner width, R rows: T * K, and those without a
# token
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from steplab.kernels import e4m3_network
from steplab.kernels.activation import RowWeights
from steplab.kernels.e4m3_network import Groups, Kept, Needs
from steplab.kernels.e4m3_passes import MULTIPLE
from steplab.kernels.experts import ExpertWeights, GroupedMatmul, RoutedTokens
from steplab.kernels.experts._rows import place_rows, sum_rows
from steplab.kernels.triton_runtime import refuse_device

NEEDS_GPU = True
NOT_TUNED = "It rounds to 8 bits, which precision=fp8 asks for."


@torch.library.custom_op("steplab::experts_fp8", mutates_args=())
def experts_fp8(
    x_TD: Tensor,
    weights_TK: Tensor,
    w_in_EFD: Tensor,
    w_out_EDF: Tensor,
    row_TK: Tensor,
    source_R: Tensor,
    offsets_E: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (output_TD, z_RF in e4m3, scales_3R)."""
    groups = _groups(weights_TK, source_R, offsets_E)
    y_RD, kept = e4m3_network.forward(x_TD, w_in_EFD, w_out_EDF, groups)
    return sum_rows(y_RD, row_TK), *kept


@experts_fp8.register_fake
def _(
    x_TD: Tensor, weights_TK: Tensor, w_in_EFD: Tensor, w_out_EDF: Tensor, row_TK: Tensor,
    source_R: Tensor, offsets_E: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    R = source_R.shape[0]
    z_RF = x_TD.new_empty(R, w_in_EFD.shape[1], dtype=torch.float8_e4m3fn)
    return x_TD.new_empty(x_TD.shape), z_RF, x_TD.new_empty(3, R, dtype=torch.float32)


@torch.library.custom_op("steplab::experts_fp8_backward", mutates_args=())
def experts_fp8_backward(
    dout_TD: Tensor,
    x_TD: Tensor,
    weights_TK: Tensor,
    w_in_EFD: Tensor,
    w_out_EDF: Tensor,
    row_TK: Tensor,
    source_R: Tensor,
    offsets_E: Tensor,
    z_RF: Tensor,
    scales_3R: Tensor,
    need_dx: bool,
    need_dw_in: bool,
    need_dw_out: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, the weights and both matrices; empty where not needed."""
    dx_RD, dw_in_EFD, dw_out_EDF, dweights = e4m3_network.backward(
        dout_TD, x_TD, w_in_EFD, w_out_EDF, _groups(weights_TK, source_R, offsets_E),
        Kept(z_RF, scales_3R), Needs(need_dx, need_dw_in, need_dw_out),
    )  # fmt: skip
    assert dweights is not None
    dx_TD = sum_rows(dx_RD, row_TK) if need_dx else dx_RD
    return dx_TD, dweights.view_as(weights_TK).to(weights_TK.dtype), dw_in_EFD, dw_out_EDF


@experts_fp8_backward.register_fake
def _(dout_TD: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    need_dx, *need_matrices = inputs[-3:]
    pairs = zip(inputs[:4], (need_dx, True, *need_matrices), strict=True)
    return tuple(tensor.new_empty(tensor.shape if need else 0) for tensor, need in pairs)


def _groups(weights_TK: Tensor, source_R: Tensor, offsets_E: Tensor) -> Groups:
    return Groups(RowWeights(weights_TK.flatten(), source_R), weights_TK.shape[1], offsets_E)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # no zeros in the size of what is kept
    ctx.save_for_backward(*inputs, *output[1:])


def _differentiate(ctx: Any, dout_TD: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if dout_TD is None:
        return (None,) * 7
    need_dx, _, *need_matrices = needs = ctx.needs_input_grad[:4]
    found = experts_fp8_backward(dout_TD, *ctx.saved_tensors, need_dx, *need_matrices)
    gradients = (g if need else None for g, need in zip(found, needs, strict=True))
    return *gradients, None, None, None


experts_fp8.register_autograd(_differentiate, setup_context=_keep)


def refuse(x_TD: Tensor, experts: ExpertWeights) -> str:
    """Return why it cannot run, or ""."""
    D, F = experts.w_out_EDF.shape[1:]
    return refuse_device(x_TD) or e4m3_network.refuse(x_TD, D, F, experts.activation)


def pad_groups(
    row_TK: Tensor, offsets_E: Tensor, experts_TK: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return row_TK, source_R and offsets_E of groups that are multiples of 16, none empty.

    R is the same whatever the groups are; a row without an assignment has -1.
    """
    start_E = torch.nn.functional.pad(offsets_E[:-1], (1, 0))
    size_E = offsets_E - start_E
    padded_E = (size_E + (MULTIPLE - 1)).clamp_min(MULTIPLE) // MULTIPLE * MULTIPLE
    ends_E = padded_E.cumsum(0, dtype=torch.int32)
    row_TK = row_TK + (ends_E - padded_E - start_E)[experts_TK]
    assignments = torch.arange(row_TK.numel(), dtype=torch.int32, device=row_TK.device)
    rows = -(-row_TK.numel() // MULTIPLE) * MULTIPLE + MULTIPLE * offsets_E.shape[0]
    source_R = torch.full((rows,), -1, dtype=torch.int32, device=row_TK.device)
    return row_TK, source_R.scatter(0, row_TK.flatten().long(), assignments), ends_E


def experts(
    tokens: RoutedTokens, experts: ExpertWeights, matmul: GroupedMatmul
) -> tuple[Tensor, Tensor]:
    """Return (output_TD, 0)."""
    x_TD, weights_TK, experts_TK = tokens
    w_in_EFD, w_out_EDF, _ = experts
    row_TK, _, offsets_E = place_rows(experts_TK, w_in_EFD.shape[0])
    placed = pad_groups(row_TK, offsets_E, experts_TK)
    out_TD, *_ = experts_fp8(x_TD, weights_TK, w_in_EFD, w_out_EDF, *placed)
    return out_TD, weights_TK.new_zeros(())
