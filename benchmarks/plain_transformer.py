"""A transformer in plain torch, as somebody's own model: plain_transformer.py:make"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import steplab


class Block(nn.Module):
    """Attention and feed-forward, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the stream after the block."""
        B, T, D = x_BTD.shape
        qkv = self.qkv(self.norm1(x_BTD)).view(B, T, 3, self.heads, D // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).reshape(B, T, D))
        return x_BTD + self.down(F.gelu(self.up(self.norm2(x_BTD))))


class Model(nn.Module):
    """Predicts the next token."""

    def __init__(self, width: int, layers: int, heads: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(context, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the logits (B, T, vocabulary)."""
        x_BTD = self.tokens(tokens_BT) + self.places
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


def make(
    width: int = 768,
    layers: int = 8,
    heads: int = 12,
    context: int = 1024,
    vocabulary: int = 16_384,
) -> steplab.UserModel:
    """A transformer of these sizes on random tokens."""

    def batches(size: int) -> Iterator[Tensor]:
        while True:
            yield torch.randint(vocabulary, (size, context + 1))

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    model = Model(width, layers, heads, context, vocabulary)
    return steplab.UserModel(model, batches, loss, tokens_per_sequence=context)
