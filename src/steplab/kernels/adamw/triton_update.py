"""One kernel per parameter that reads and writes every number once: 28 bytes per parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from steplab.kernels._triton import DTYPES, refuse_device

if TYPE_CHECKING:
    from steplab.kernels.adamw import Rule, Weight
NEEDS_GPU = True


def refuse(param: Tensor) -> str:
    """Return why it cannot run, or ""."""
    if param.dtype not in DTYPES:
        return f"needs fp16, bf16 or fp32, not {param.dtype}"
    if not param.is_contiguous():
        return "needs contiguous parameters"
    return refuse_device(param)


@torch.no_grad()
def update(weight: Weight, rule: Rule, lr: Tensor, coefficient: Tensor | None) -> None:
    """Update param, master and moments in place."""
    from steplab.kernels.adamw import _triton_launch

    _triton_launch.update(weight, rule, lr, coefficient)
