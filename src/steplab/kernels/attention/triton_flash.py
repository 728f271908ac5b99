"""FlashAttention-2 in Triton: shared heads, documents, any length, any head width up to 256."""

# B batch, H query heads, G key heads, T queries, S keys, D head width
from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from steplab.kernels.attention import _limits
from steplab.kernels.attention._flash_op import flash_op

# Asked once, here: torch.compile cannot trace the questions. Triton itself is imported at the
# first call, because a process that never comes here need not wait for it.
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def refuse(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    causal: bool,
    documents_BS: Tensor | None = None,
) -> str:
    """Return why it cannot run, or ""."""
    if not HAS_TRITON:
        return "needs triton, which is not installed"
    on_nvidia = q_BHTD.device.type == "cuda" and torch.version.cuda is not None
    if not on_nvidia and not INTERPRETED:
        return f"needs an NVIDIA GPU, not {q_BHTD.device.type}"
    if on_nvidia and torch.cuda.get_device_capability(q_BHTD.device) < (8, 0):
        return "needs compute capability 8.0 or newer"
    if q_BHTD.dtype not in DTYPES:
        return f"needs fp16, bf16 or fp32, not {q_BHTD.dtype}"
    if q_BHTD.shape[-1] > 256:
        return f"needs a head width of at most 256, not {q_BHTD.shape[-1]}"
    return _limits.flash_inputs(q_BHTD, k_BGSD, v_BGSD, causal, documents_BS)


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    from steplab.kernels.attention import _triton_launch

    return _triton_launch.forward(*args)


def _backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    from steplab.kernels.attention import _triton_launch

    return _triton_launch.backward(*args)


attention = flash_op("triton_flash_attention", _forward, _backward)
