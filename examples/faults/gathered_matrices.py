"""A matrix per token: steplab profile examples/faults/gathered_matrices.py:faulty

The weights of every token's expert are gathered before the product. The clean twin multiplies the
tokens of each expert together.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "gathered_matrices"
where = "cpu"
EXPERTS = 4


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


class Experts(nn.Module):
    """Every row goes to the expert of its number."""

    def __init__(self, width: int, gathered: bool) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.weight = nn.Parameter(torch.randn(EXPERTS, width, width) * width**-0.5)
        self.gathered = gathered

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        x_ND = self.first(x_ND)
        if self.gathered:
            expert_N = torch.arange(len(x_ND)) % EXPERTS
            return torch.einsum("nd,ndh->nh", x_ND, self.weight[expert_N])
        x_END = x_ND.unflatten(0, (-1, EXPERTS)).transpose(0, 1)
        return torch.bmm(x_END, self.weight).transpose(0, 1).flatten(0, 1)


def made(width: int, rows: int, gathered: bool) -> steplab.UserModel:
    """One layer of experts."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * rows, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).square().mean()

    return steplab.UserModel(Experts(width, gathered), batches, loss, rows, optimizer=adamw)


def faulty(width: int = 256, rows: int = 64) -> steplab.UserModel:
    """One matrix per row."""
    return made(width, rows, gathered=True)


def clean(width: int = 256, rows: int = 64) -> steplab.UserModel:
    """One matrix per expert."""
    return made(width, rows, gathered=False)
