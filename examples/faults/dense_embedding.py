"""A dense gradient of a large table: steplab profile examples/faults/dense_embedding.py:faulty

A batch touches a few rows of a large table, but its gradient and its update are dense. The clean
twin's table has only rows that occur.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "dense_embedding"
where = "cpu"
FEW = 1000  # words that ever occur


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, words: int, context: int, dense: bool) -> steplab.UserModel:
    """The mean of some rows."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randint(FEW, (size, context))
        while True:
            yield batch

    def loss(model: nn.Module, ids_BT: Tensor) -> Tensor:
        return model(ids_BT).square().mean()

    model = nn.Embedding(words if dense else FEW, width)
    return steplab.UserModel(model, batches, loss, context, optimizer=adamw)


def faulty(width: int = 128, words: int = 100000, context: int = 64) -> steplab.UserModel:
    """All rows."""
    return made(width, words, context, dense=True)


def clean(width: int = 128, words: int = 100000, context: int = 64) -> steplab.UserModel:
    """Rows that occur."""
    return made(width, words, context, dense=False)
