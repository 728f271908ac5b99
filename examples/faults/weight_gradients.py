"""Gradients of weights for nothing: steplab profile examples/faults/weight_gradients.py:faulty

A fixed network judges the images that a small one makes. No optimizer has its weights, but they ask
for gradients, and every convolution computes them beside that of its input. The clean twin has
frozen them.
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


def made(width: int, side: int, frozen: bool) -> steplab.UserModel:
    """`frozen`: the weights of the network that judges ask for no gradients."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    judge = nn.Sequential(
        nn.Conv2d(3, width, 3),
        nn.ReLU(),
        nn.Conv2d(width, width, 3),
        nn.ReLU(),
        nn.Conv2d(width, width, 3),
    )
    judge.requires_grad_(not frozen).to(device)

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.rand(size, 3, side, side, device=device)
        while True:
            yield batch

    def loss(model: nn.Module, image_NCHW: Tensor) -> Tensor:
        made_NCHW = model(image_NCHW)
        seen_NCHW: Tensor = judge(made_NCHW)
        return seen_NCHW.square().mean()

    model = nn.Conv2d(3, 3, 3, padding=1)
    return steplab.UserModel(model, batches, loss, unit="images", optimizer=adamw)


def faulty(width: int = 64, side: int = 64) -> steplab.UserModel:
    """The judge's weights ask for gradients."""
    return made(width, side, frozen=False)


def clean(width: int = 64, side: int = 64) -> steplab.UserModel:
    """They are frozen."""
    return made(width, side, frozen=True)
