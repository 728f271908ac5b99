"""Forward unused: steplab profile examples/faults/forward_unused.py:faulty

After the loss, the same batch runs through the model once more for a metric. The clean twin takes
the metric from the output that it has.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "forward_unused"
where = "cpu"


class Scored(nn.Module):
    """A network that keeps the score of its last batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [nn.Linear(width, width) for _ in range(4)]
        self.net = nn.Sequential(*(part for layer in layers for part in (layer, nn.GELU())))
        self.score = torch.zeros(())

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        return self.net(x_ND)


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, rows: int, again: bool) -> steplab.UserModel:
    """The score is the mean of the output."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * rows, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        y_ND = model(x_ND)
        with torch.no_grad():
            model.score = (model(x_ND) if again else y_ND).mean()
        return y_ND.abs().mean()

    return steplab.UserModel(Scored(width), batches, loss, rows, optimizer=adamw)


def faulty(width: int = 384, rows: int = 128) -> steplab.UserModel:
    """Runs twice."""
    return made(width, rows, again=True)


def clean(width: int = 384, rows: int = 128) -> steplab.UserModel:
    """Runs once."""
    return made(width, rows, again=False)
