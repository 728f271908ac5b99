"""torch's own grouped product: on Hopper in bf16 one CUTLASS kernel without a host sync."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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
    # Inductor's shape check asks for bf16 whatever the device (torch 2.11 to 2.13).
    if torch.compiler.is_compiling() and x_RK.dtype != torch.bfloat16:
        return f"needs bf16 under torch.compile, not {x_RK.dtype}"
    row_bytes = x_RK.element_size()
    if x_RK.shape[-1] * row_bytes % 16 or w_EKN.shape[-1] * row_bytes % 16:
        return f"needs rows of a multiple of 16 bytes, not {tuple(w_EKN.shape[1:])} elements"
    return ""


def grouped_mm(x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    """Return (R, N)."""
    return F.grouped_mm(x_RK, w_EKN, offs=offsets_E)
