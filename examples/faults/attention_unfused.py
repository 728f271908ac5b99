"""Unfused attention: steplab profile examples/faults/attention_unfused.py:faulty

Scores, mask, softmax and values as four operations on context x context tensors. The clean twin
calls F.scaled_dot_product_attention.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import steplab

rule = "attention_unfused"
where = "cpu"


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int, by_hand: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.heads, self.by_hand = heads, by_hand

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return (B, T, D)."""
        parts = self.qkv(x_BTD).chunk(3, dim=-1)
        q_BHTd, k_BHTd, v_BHTd = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        if self.by_hand:
            scores_BHTT = q_BHTd @ k_BHTd.transpose(-1, -2) * q_BHTd.shape[-1] ** -0.5
            length = x_BTD.shape[1]
            past_TT = torch.ones(length, length, dtype=torch.bool, device=x_BTD.device).tril()
            scores_BHTT = scores_BHTT.masked_fill(~past_TT, float("-inf"))
            mixed_BHTd = scores_BHTT.softmax(-1) @ v_BHTd
        else:
            mixed_BHTd = F.scaled_dot_product_attention(q_BHTd, k_BHTd, v_BHTd, is_causal=True)
        return x_BTD + self.out(mixed_BHTd.transpose(1, 2).flatten(-2))


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, heads: int, context: int, layers: int, by_hand: bool) -> steplab.UserModel:
    """A stack of attention."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size, context, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_BTD: Tensor) -> Tensor:
        return model(x_BTD).abs().mean()

    model = nn.Sequential(*(Attention(width, heads, by_hand) for _ in range(layers)))
    return steplab.UserModel(model, batches, loss, context, optimizer=adamw)


def faulty(
    width: int = 256, heads: int = 4, context: int = 256, layers: int = 2
) -> steplab.UserModel:
    """By hand."""
    return made(width, heads, context, layers, by_hand=True)


def clean(
    width: int = 256, heads: int = 4, context: int = 256, layers: int = 2
) -> steplab.UserModel:
    """Fused."""
    return made(width, heads, context, layers, by_hand=False)
