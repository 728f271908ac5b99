"""ComplexEMA as a scan in Triton: any length, states in fp32, coefficients from fp64."""

# B batch, L steps of time, D channels, N modes of each
from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from steplab.kernels.ema import _scan_op
from steplab.kernels.ema._parameters import Parameters

# Asked once, here: torch.compile cannot trace the questions. Triton itself is imported at the
# first call, because a process that never comes here need not wait for it.
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MOST_MODES = 32  # twice as many would spill their states from registers at every step


def refuse(x_BLD: Tensor, parameters: Parameters) -> str:
    """Return why it cannot run, or ""."""
    if not HAS_TRITON:
        return "needs triton, which is not installed"
    on_nvidia = x_BLD.device.type == "cuda" and torch.version.cuda is not None
    if not on_nvidia and not INTERPRETED:
        return f"needs an NVIDIA GPU, not {x_BLD.device.type}"
    if on_nvidia and torch.cuda.get_device_capability(x_BLD.device) < (8, 0):
        return "needs compute capability 8.0 or newer"
    if x_BLD.dtype not in DTYPES:
        return f"needs fp16, bf16 or fp32, not {x_BLD.dtype}"
    if parameters.alpha_DN.shape[1] > MOST_MODES:
        return f"needs at most {MOST_MODES} modes, not {parameters.alpha_DN.shape[1]}"
    return ""


ema = _scan_op.run
