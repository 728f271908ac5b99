"""Noisy measurement: steplab profile examples/faults/noisy_measurement.py:faulty

Every second step is disturbed, as if by another process. The clean twin is not.
"""

import time
from collections.abc import Iterator
from itertools import count

import torch
from torch import Tensor, nn

import steplab

rule = "noisy_measurement"
where = "cpu"

DISTURBED_SECONDS = 0.02


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, rows: int, disturbed: bool) -> steplab.UserModel:
    """One layer; the disturbance is in the loss, where no fetch hides it."""
    number = count()

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * rows, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        if disturbed and next(number) % 2:
            time.sleep(DISTURBED_SECONDS)
        return model(x_ND).abs().mean()

    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    return steplab.UserModel(model, batches, loss, rows, optimizer=adamw)


def faulty(width: int = 512, rows: int = 256) -> steplab.UserModel:
    """Disturbed."""
    return made(width, rows, disturbed=True)


def clean(width: int = 512, rows: int = 256) -> steplab.UserModel:
    """Left alone."""
    return made(width, rows, disturbed=False)
