"""The Triton attention with tiles of the user's choice. Imports torch and triton."""

# B batch, H heads, T queries, D head width
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from steplab.kernels.attention import _triton_launch as launch
from steplab.kernels.attention._flash_op import flash_op
from steplab.kernels.attention._triton_config import Tiling
from steplab.studies.attention.plan import TILE_PATTERN


@functools.cache  # an op is registered once per process
def attention_by(tiles: str) -> Callable[..., Tensor]:
    """Return `attention(q, k, v, causal)` whose three kernels all have these tiles."""
    found = TILE_PATTERN.fullmatch(tiles)
    assert found, tiles
    rows, columns, warps, stages = (int(number) for number in found.groups())
    by_copy_engine = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    tiling = Tiling(rows, columns, warps, stages, by_copy_engine)

    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        return launch.forward_by(tiling, *args)

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        out, lse, *mask = rest
        dq, delta = launch.dq_by(tiling, dout, q, k, v, out, lse, *mask)
        return dq, *launch.dkdv_by(tiling, dout, q, k, v, lse, delta, *mask)

    return flash_op(f"triton_flash_{tiles}", forward, backward)
