"""Logits to the next token."""

# B batch, V vocabulary
from __future__ import annotations

import torch
from torch import Tensor


def sample(logits_BV: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> Tensor:
    """Return one token per row, (B,).

    A temperature of 0 takes the likeliest. `top_k` leaves the k likeliest to choose from; 0: all.
    """
    if temperature == 0:
        return logits_BV.argmax(-1)
    scaled_BV = logits_BV.double() / temperature
    if 0 < top_k < scaled_BV.shape[-1]:
        least_B1 = scaled_BV.topk(top_k).values[:, -1:]
        scaled_BV = scaled_BV.masked_fill(scaled_BV < least_B1, -torch.inf)
    return torch.multinomial(scaled_BV.softmax(-1), 1, generator=generator)[:, 0]
