"""One backward for all: steplab profile examples/faults/graph_memory.py:faulty

The batch is split into four, but the losses are added up before the one backward, so that the
activations of all four live at once. The clean twin does not split it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "graph_memory"
where = "cpu"


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, rows: int, layers: int, kept: bool) -> steplab.UserModel:
    """A stack of layers, called on parts of the batch."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * rows, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        if not kept:
            return model(x_ND).square().mean()
        return torch.stack([model(part).square().mean() for part in x_ND.chunk(4)]).mean()

    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))
    )
    return steplab.UserModel(model, batches, loss, rows, optimizer=adamw)


def faulty(width: int = 128, rows: int = 512, layers: int = 12) -> steplab.UserModel:
    """All activations at once."""
    return made(width, rows, layers, kept=True)


def clean(width: int = 128, rows: int = 512, layers: int = 12) -> steplab.UserModel:
    """One part."""
    return made(width, rows, layers, kept=False)
