"""Garbage collection: steplab profile examples/faults/garbage_collection.py:faulty

Every step ends with gc.collect(). The clean twin leaves the collector alone.
"""

import gc
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "garbage_collection"
where = "cpu"


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, rows: int, layers: int, collects: bool) -> steplab.UserModel:
    """A stack of layers."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * rows, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        if collects:
            gc.collect()
        return model(x_ND).square().mean()

    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    return steplab.UserModel(model, batches, loss, rows, optimizer=adamw)


def faulty(width: int = 256, rows: int = 128, layers: int = 6) -> steplab.UserModel:
    """In every step."""
    return made(width, rows, layers, collects=True)


def clean(width: int = 256, rows: int = 128, layers: int = 6) -> steplab.UserModel:
    """Now and then."""
    return made(width, rows, layers, collects=False)
