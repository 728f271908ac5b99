"""torch's FlexAttention, compiled, as a peer to compare with. Imports torch."""

# B batch, H heads, T queries and keys, D head width
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from steplab.errors import Unsupported


def flex(context: int, causal: bool, device: torch.device) -> Callable[..., Tensor]:
    """Return `attention(q, k, v)`; the block mask is made here, outside of what is timed."""
    if device.type != "cuda":
        raise Unsupported("flex has no backward on a CPU.")
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    if not causal:
        return lambda q, k, v: compiled(q, k, v)
    mask = create_block_mask(_is_seen, None, None, context, context, device=device.type)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def _is_seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key
