"""A dense gradient of a large table: steplab profile examples/faults/dense_embedding.py:faulty

A batch touches a few rows of a large table, but its gradient and its update are dense. The clean
twin's are sparse.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "dense_embedding"
where = "cpu"


def sgd(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """Takes gradients of either kind."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def made(width: int, words: int, context: int, dense: bool) -> steplab.UserModel:
    """The mean of some rows."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randint(words, (size, context))
        while True:
            yield batch

    def loss(model: nn.Module, ids_BT: Tensor) -> Tensor:
        return model(ids_BT).square().mean()

    model = nn.Embedding(words, width, sparse=not dense)
    return steplab.UserModel(model, batches, loss, context, optimizer=sgd)


def faulty(width: int = 64, words: int = 100000, context: int = 32) -> steplab.UserModel:
    """All rows."""
    return made(width, words, context, dense=True)


def clean(width: int = 64, words: int = 100000, context: int = 32) -> steplab.UserModel:
    """The rows of the batch."""
    return made(width, words, context, dense=False)
