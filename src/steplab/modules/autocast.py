"""What autocast does to a matrix product, for layers whose ops it does not know."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype a matrix product of `x` runs in: autocast's where it is on.

    As torch does it, autocast leaves fp64 alone.
    """
    if not _autocasts(x) or x.dtype == torch.float64:
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Let autocast change nothing on the device of `x`: the casts are the caller's."""
    return torch.autocast(x.device.type, enabled=False) if _autocasts(x) else nullcontext()


def _autocasts(x: Tensor) -> bool:
    # Tensors without data have a device that autocast does not know.
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)
