"""torch's own grouped product: on Hopper in bf16 one CUTLASS kernel without a host sync."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from steplab.kernels._triton import by_triton
from steplab.kernels.grouped_mm._segments import add_segments, find_segments

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TAGS = ()


def refuse(x_RK: Tensor, w_EKN: Tensor) -> str:
    """Return why it cannot run, or ""."""
    if x_RK.dtype not in DTYPES:
        return f"needs bf16, fp16 or fp32, not {x_RK.dtype}"
    # Elsewhere torch's own op reads the offsets back and multiplies group by group, which is
    # what `loop` says of itself.
    on_cuda = x_RK.device.type == "cuda"
    if on_cuda and x_RK.dtype != torch.bfloat16:
        return f"needs bf16 on CUDA, not {x_RK.dtype}"
    if on_cuda and torch.cuda.get_device_capability(x_RK.device) < (9, 0):
        return "needs compute capability 9.0 or newer"
    row_bytes = x_RK.element_size()
    if x_RK.shape[-1] * row_bytes % 16 or w_EKN.shape[-1] * row_bytes % 16:
        return f"needs rows of a multiple of 16 bytes, not {tuple(w_EKN.shape[1:])} elements"
    return ""


def product(x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    """Return (R, N)."""
    return F.grouped_mm(x_RK, w_EKN, offs=offsets_E)


def weight_gradient(x_RK: Tensor, dout_RN: Tensor, offsets_E: Tensor) -> Tensor:
    """Return (E, K, N)."""
    if not by_triton(x_RK):
        return F.grouped_mm(x_RK.transpose(0, 1), dout_RN, offs=offsets_E)
    ends_S, group_S = find_segments(offsets_E, x_RK.shape[0])
    parts_SKN = F.grouped_mm(x_RK.transpose(0, 1), dout_RN, offs=ends_S)
    return add_segments(parts_SKN, group_S, offsets_E.shape[0])
