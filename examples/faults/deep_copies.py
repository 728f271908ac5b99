"""Deep copies: steplab profile examples/faults/deep_copies.py:faulty

Training keeps the last good weights, to go back to them after a loss that is not finite. It copies
the whole state dict in every step. The clean twin does so every hundred steps.
"""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "deep_copies"
where = "cpu"


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, layers: int, rows: int, every: int) -> steplab.UserModel:
    """A deep network on few rows."""
    kept, steps = {}, 0

    def batches(size: int) -> Iterator[Tensor]:
        while True:
            yield torch.randn(size * rows, width)

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        nonlocal kept, steps
        steps += 1
        if steps % every == 0:
            kept = copy.deepcopy(model.state_dict())
        return model(x_ND).square().mean()

    blocks = (nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(layers))
    return steplab.UserModel(nn.Sequential(*blocks), batches, loss, rows, optimizer=adamw)


def faulty(width: int = 256, layers: int = 12, rows: int = 16) -> steplab.UserModel:
    """A copy in every step."""
    return made(width, layers, rows, every=1)


def clean(width: int = 256, layers: int = 12, rows: int = 16) -> steplab.UserModel:
    """A copy now and then."""
    return made(width, layers, rows, every=100)
