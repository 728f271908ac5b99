"""Double precision: steplab profile examples/faults/wide_dtype.py:faulty

A table from numpy is float64, so that adding it makes all that follows float64. The clean twin
converts it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "wide_dtype"
where = "cpu"


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, rows: int, layers: int, double: bool) -> steplab.UserModel:
    """A stack of layers, and logits adjusted by the frequency of each class."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * rows, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        logits_ND = model(x_ND) + prior_D
        return nn.functional.cross_entropy(logits_ND, torch.zeros(len(x_ND), dtype=torch.long))

    prior_D = torch.zeros(width, dtype=torch.float64 if double else torch.float32)
    model = nn.Linear(width, width)
    return steplab.UserModel(model, batches, loss, rows, optimizer=adamw)


def faulty(width: int = 1024, rows: int = 512, layers: int = 1) -> steplab.UserModel:
    """As numpy made it."""
    return made(width, rows, layers, double=True)


def clean(width: int = 1024, rows: int = 512, layers: int = 1) -> steplab.UserModel:
    """As the model is."""
    return made(width, rows, layers, double=False)
