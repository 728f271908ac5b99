"""Straggler: steplab profile examples/faults/straggler_rank.py:faulty --ranks 2

The files of rank 1 come from a slow disk: each of its batches takes 20 ms longer, and a rank reads
those of all ranks to find its own, 40 ms a step. In the clean twin all ranks read alike.
"""

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from hardware.card import Layer
from torch import Tensor, nn

import steplab

rule = "straggler_rank"
where = "cpu"
ranks = 2

SLOW_SECONDS = 0.02
SLOW_RANK = 1
ROWS = 16
LAYERS = 4
LAYER_MS = 15.0


def read(size: int, width: int, seconds: float) -> Iterator[Tensor]:
    """Yield batches; on one rank each takes `seconds` longer."""
    is_slow = dist.is_initialized() and dist.get_rank() == SLOW_RANK
    batch = torch.randn(size * ROWS, width)
    while True:
        if is_slow:
            time.sleep(seconds)
        yield batch


def made(width: int, seconds: float) -> steplab.UserModel:
    """A few layers."""
    model = nn.Sequential(*(Layer(width, LAYER_MS) for _ in range(LAYERS)))

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).abs().mean()

    def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))

    return steplab.UserModel(
        model, lambda size: read(size, width, seconds), loss, ROWS, optimizer=adamw
    )


def faulty(width: int = 32) -> steplab.UserModel:
    """One slow disk."""
    return made(width, SLOW_SECONDS)


def clean(width: int = 32) -> steplab.UserModel:
    """All disks alike."""
    return made(width, 0.0)
