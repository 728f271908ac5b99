"""Padding: steplab profile examples/faults/padded_batch.py:faulty

Sequences are padded to twice their length. The clean twin's batch ends where they end.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "padded_batch"
where = "cpu"


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, words: int, context: int, padded: bool) -> steplab.UserModel:
    """A table and two layers."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randint(1, words, (size, context))
        batch = nn.functional.pad(batch, (0, context)) if padded else batch
        while True:
            yield batch

    def loss(model: nn.Module, ids_BT: Tensor) -> Tensor:
        return model(ids_BT).square().mean()

    layers = nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)
    model = nn.Sequential(nn.Embedding(words, width), *layers)
    return steplab.UserModel(model, batches, loss, context, optimizer=adamw)


def faulty(width: int = 128, words: int = 1000, context: int = 256) -> steplab.UserModel:
    """To twice the length."""
    return made(width, words, context, padded=True)


def clean(width: int = 128, words: int = 1000, context: int = 256) -> steplab.UserModel:
    """Not at all."""
    return made(width, words, context, padded=False)
