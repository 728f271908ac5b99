"""The dtype that a layer computes in: that of autocast, or fp32 whatever the model is cast to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype a matrix product of `x` runs in: autocast's where it is on.

    As in torch, autocast leaves fp64 alone.
    """
    if not _autocasts(x) or x.dtype == torch.float64:
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Turn autocast off on the device of `x`, for a caller that casts by itself."""
    return torch.autocast(x.device.type, enabled=False) if _autocasts(x) else nullcontext()


def _autocasts(x: Tensor) -> bool:
    # Autocast does not know the device of meta tensors.
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


class Fp32Module(nn.Module):
    """A module whose parameters and buffers stay in fp32 when a model is cast to 16 bits."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def keep(x: Tensor) -> Tensor:
            moved = fn(x)
            if moved.dtype in (torch.bfloat16, torch.float16):
                return x.to(moved.device)  # not cast back from `moved`, which has been rounded
            return moved

        return super()._apply(keep, recurse)
