"""torch's own op, after an addition of its own."""

# D width
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def refuse(x: Tensor, weight_D: Tensor, added: Tensor | None = None) -> str:
    """Return why it cannot run, or ""."""
    stream = x.dtype if added is None else torch.promote_types(x.dtype, added.dtype)
    if stream != weight_D.dtype:
        # torch then warns, and computes step by step.
        return f"needs one dtype, not a stream of {stream} and a weight of {weight_D.dtype}"
    return ""


def rms_norm(
    x: Tensor, weight_D: Tensor, eps: float, added: Tensor | None, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Return (normed, stream)."""
    stream = x if added is None else x + added
    normed = F.rms_norm(stream, (stream.shape[-1],), weight_D, eps)
    return normed.to(dtype or stream.dtype), stream
