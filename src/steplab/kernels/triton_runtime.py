"""What the Triton implementations of several ops ask before they run. Triton is not imported."""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

# Asked once, here: torch.compile cannot trace the questions. Triton itself is imported at the
# first launch, because a process that never comes there need not wait for it.
HAS_TRITON = importlib.util.find_spec("triton") is not None
# As Triton reads it.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_BATCH = 65_535  # CUDA's limit of the second and third axis of a grid


def refuse_device(x: Tensor) -> str:
    """Return why Triton kernels cannot run where `x` is, or ""."""
    if not HAS_TRITON:
        return "needs triton, which is not installed"
    on_nvidia = x.device.type == "cuda" and torch.version.cuda is not None
    if not on_nvidia and not INTERPRETED:
        return f"needs an NVIDIA GPU, not {x.device.type}"
    if on_nvidia and torch.cuda.get_device_capability(x.device) < (8, 0):
        return "needs compute capability 8.0 or newer"
    return ""


def refuse_batch(x: Tensor) -> str:
    """Return why kernels with a program for every row of the batch, `x.shape[0]`, cannot run."""
    B = x.shape[0]
    return f"needs a batch of at most {MAX_BATCH}, not {B}" if B > MAX_BATCH else ""


def use_triton(x: Tensor) -> bool:
    """Whether a part that exists in Triton and in torch takes Triton's here."""
    return HAS_TRITON and (x.is_cuda or INTERPRETED)


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be that of the inputs."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
