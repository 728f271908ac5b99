"""A gradient for the pixels: steplab profile examples/faults/input_gradient.py:faulty

The batch requires a gradient, which the first convolution computes and nobody reads. In the clean
twin only weights do.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "unused_work"
where = "cpu"


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, side: int, required: bool) -> steplab.UserModel:
    """A convolution with large filters, and a mean."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size, 3, side, side)
        while True:
            yield batch

    def loss(model: nn.Module, x_BCHW: Tensor) -> Tensor:
        if required:
            x_BCHW = x_BCHW.detach().requires_grad_()
        return model(x_BCHW).square().mean()

    model = nn.Sequential(nn.Conv2d(3, width, 7, padding=3), nn.ReLU(), nn.MaxPool2d(4))
    return steplab.UserModel(model, batches, loss, unit="images", optimizer=adamw)


def faulty(width: int = 32, side: int = 64) -> steplab.UserModel:
    """With a gradient of the input."""
    return made(width, side, required=True)


def clean(width: int = 32, side: int = 64) -> steplab.UserModel:
    """Without."""
    return made(width, side, required=False)
