"""Constant rebuilt: steplab profile examples/faults/constant_rebuilt.py:faulty

Every layer makes its own causal mask out of positions, in every step. The clean twin has one,
as a buffer.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "constant_rebuilt"
where = "cpu"


def past(time: int) -> Tensor:
    """Return (T, T): the weights of a mean over the past."""
    whole_TT = torch.ones(time, time).tril()
    return whole_TT / whole_TT.sum(-1, keepdim=True)


class Past(nn.Module):
    """Adds to every position the mean of the past."""

    def __init__(self, width: int, past_TT: Tensor | None) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.register_buffer("past_TT", past_TT)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return (T, D)."""
        past_TT = past(len(x_TD)) if self.past_TT is None else self.past_TT
        return x_TD + self.mix(past_TT @ x_TD)


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(time: int, width: int, rebuild: bool) -> steplab.UserModel:
    """Four layers over one long sequence."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(time, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_TD: Tensor) -> Tensor:
        return model(x_TD).abs().mean()

    past_TT = None if rebuild else past(time)
    model = nn.Sequential(*(Past(width, past_TT) for _ in range(4)))
    return steplab.UserModel(model, batches, loss, time, optimizer=adamw)


def faulty(time: int = 1024, width: int = 32) -> steplab.UserModel:
    """Builds masks."""
    return made(time, width, rebuild=True)


def clean(time: int = 1024, width: int = 32) -> steplab.UserModel:
    """Has them."""
    return made(time, width, rebuild=False)
