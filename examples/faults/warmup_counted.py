"""Warm-up counted: steplab profile examples/faults/warmup_counted.py:faulty

The model benchmarks its algorithms during its first steps, which are more than the warm-up has.
The clean twin benchmarks them when it is built.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "warmup_counted"
where = "cpu"
view = "mean"  # what warm-up spoils

TRIALS = 9  # four more than the warm-up's five
REPEATS = 12


class Tuned(nn.Module):
    """Multiplies by one of several algorithms, all of which are tried first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.tried = 0

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        if self.tried < TRIALS:
            self.tried += 1
            with torch.no_grad():
                for _ in range(REPEATS):
                    self.mix(x_ND)
        return self.mix(x_ND)


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, rows: int, trials: int) -> steplab.UserModel:
    """One layer, `trials` of whose trials are still to come."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * rows, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).abs().mean()

    model = Tuned(width)
    model.tried = TRIALS - trials
    return steplab.UserModel(model, batches, loss, rows, optimizer=adamw)


def faulty(width: int = 1024, rows: int = 128) -> steplab.UserModel:
    """Tries in the steps."""
    return made(width, rows, TRIALS)


def clean(width: int = 1024, rows: int = 128) -> steplab.UserModel:
    """Has tried before."""
    return made(width, rows, 0)
