"""As `grouped`, in hand-written passes: what stays for the backward is z and the tokens."""

# T tokens, K chosen experts, E experts, D width, F inner width (2F for swiglu), R = T * K rows
from __future__ import annotations

import torch
from torch import Tensor

from steplab.kernels._triton import refuse_device
from steplab.kernels.experts import ExpertWeights, GroupedMatmul
from steplab.kernels.experts._fused_op import fused_experts
from steplab.kernels.experts._rows import place

NEEDS_GPU = True


def refuse(x_TD: Tensor, experts: ExpertWeights) -> str:
    """Return why it cannot run, or ""."""
    reason = refuse_device(x_TD)
    if reason:
        return reason
    # What torch's grouped product asks for, without which it waits for the host.
    if x_TD.is_cuda and torch.cuda.get_device_capability(x_TD.device) < (9, 0):
        return "needs compute capability 9.0 or newer"
    if x_TD.dtype != torch.bfloat16:
        return f"needs bf16, not {x_TD.dtype}"
    D, F = experts.w_out_EDF.shape[1:]
    if D % 8 or F % 8:
        return f"needs widths in multiples of 8, not {D} and {F}"
    return ""


def experts(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    experts: ExpertWeights,
    matmul: GroupedMatmul,
) -> tuple[Tensor, Tensor]:
    """Return (output_TD, 0)."""
    w_in_EFD, w_out_EDF, activation = experts
    product = matmul.choose(x_TD, w_in_EFD.transpose(-2, -1))
    placed = place(experts_TK, w_in_EFD.shape[0])
    out_TD, _ = fused_experts(x_TD, weights_TK, w_in_EFD, w_out_EDF, *placed, activation, product)
    return out_TD, weights_TK.new_zeros(())
