"""Masks that nobody reads: steplab profile examples/faults/idle_buffers.py:faulty

Every layer registers a causal mask of the longest context, and attention is called with is_causal.
The clean twin has no such buffers.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import steplab

rule = "idle_buffers"
where = "cpu"


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


class Attention(nn.Module):
    """Causal attention with one head."""

    def __init__(self, width: int, longest: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        if longest:
            self.register_buffer("mask", torch.ones(longest, longest).tril())

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Mix positions."""
        q, k, v = self.qkv(x_BTD).unsqueeze(1).chunk(3, -1)
        return x_BTD + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)


def made(width: int, time: int, longest: int) -> steplab.UserModel:
    """Four layers."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size, time, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_BTD: Tensor) -> Tensor:
        return model(x_BTD).square().mean()

    model = nn.Sequential(*(Attention(width, longest) for _ in range(4)))
    return steplab.UserModel(model, batches, loss, time, optimizer=adamw)


def faulty(width: int = 64, time: int = 128, longest: int = 1024) -> steplab.UserModel:
    """With a mask in every layer."""
    return made(width, time, longest)


def clean(width: int = 64, time: int = 128, longest: int = 1024) -> steplab.UserModel:
    """Without masks."""
    return made(width, time, 0)
