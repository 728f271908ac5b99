"""Weight penalty: steplab profile examples/faults/weight_penalty.py:faulty

The squares of all weights are added to the loss, so that autograd goes back through them. The clean
twin leaves that to the optimizer, whose weight decay has the same gradient.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import steplab

rule = "weight_penalty"
where = "cpu"
FACTOR = 1e-3


def sgd(decay: float) -> Callable[..., torch.optim.Optimizer]:
    """The gradient of FACTOR * w ** 2 is 2 * FACTOR * w."""

    def make(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
        options = implementation or {"fused": True}
        return torch.optim.SGD(model.parameters(), lr=1e-3, weight_decay=decay, **options)

    return make


def made(width: int, layers: int, in_loss: bool) -> steplab.UserModel:
    """A network of few samples: its weights take most of the step."""

    def batches(size: int) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield torch.randn(size, width), torch.randn(size, width)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x_BD, y_BD = batch
        error = F.mse_loss(model(x_BD), y_BD)
        if not in_loss:
            return error
        return error + FACTOR * sum(weight.square().sum() for weight in model.parameters())

    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    optimizer = sgd(0.0 if in_loss else 2 * FACTOR)
    return steplab.UserModel(nn.Sequential(*blocks), batches, loss, 1, optimizer=optimizer)


def faulty(width: int = 768, layers: int = 4) -> steplab.UserModel:
    """Squares of all weights in the loss."""
    return made(width, layers, in_loss=True)


def clean(width: int = 768, layers: int = 4) -> steplab.UserModel:
    """Weight decay in the update."""
    return made(width, layers, in_loss=False)
