"""Modules that stay in fp32 when a model is cast to 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Precise(nn.Module):
    """A module whose parameters and buffers keep fp32 when a model is cast to 16 bits."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def keep(x: Tensor) -> Tensor:
            moved = fn(x)
            if moved.dtype in (torch.bfloat16, torch.float16):
                return x.to(moved.device)  # not back from `moved`: that has been rounded
            return moved

        return super()._apply(keep, recurse)
