"""The definition of the norm, in fp32 or better."""

# D width
from __future__ import annotations

import torch
from torch import Tensor


def layer_norm(
    x: Tensor,
    weight_D: Tensor,
    bias_D: Tensor | None,
    eps: float,
    added: Tensor | None,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Return (normed, stream)."""
    stream = x if added is None else x + added
    wide = stream.to(torch.promote_types(stream.dtype, torch.float32))
    centered = wide - wide.mean(-1, keepdim=True)
    scale = (centered.square().mean(-1, keepdim=True) + eps).rsqrt()
    normed = centered * scale * weight_D.to(wide.dtype)
    if bias_D is not None:
        normed = normed + bias_D.to(wide.dtype)
    return normed.to(dtype or stream.dtype), stream
