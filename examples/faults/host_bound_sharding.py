"""Host-bound sharding: steplab profile examples/faults/host_bound_sharding.py:faulty --ranks 2 \
--recipe parallel=fsdp

Each of two blocks has 384 frozen scales, each a parameter of its own, which fully_shard gathers,
lays out and frees one by one in Python. The clean twin has the scales of a block in one parameter.
"""

from collections.abc import Iterator

import torch
from hardware.card import Layer
from torch import Tensor, nn

import steplab

rule = "host_bound_sharding"
where = "cpu"
ranks = 2
recipes = {"faulty": ("parallel=fsdp",), "clean": ("parallel=fsdp",)}
# Thousands of small operators a step: more steps, and one with stacks, are a trace of 3 MB.
flags = {"faulty": ("--no-detail", "--schedule", "1", "2", "3", "1")}

ROWS = 16
BLOCKS = 2
LAYER_MS = 50.0
SCALES = 384


class Block(nn.Module):
    """A layer whose output is scaled."""

    def __init__(self, width: int, apart: bool) -> None:
        super().__init__()
        self.layer = Layer(width, LAYER_MS)
        number, rows = (SCALES, 2) if apart else (1, 2 * SCALES)
        self.scales = nn.ParameterList(
            nn.Parameter(torch.ones(rows, width), requires_grad=False) for _ in range(number)
        )

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        return self.layer(x_ND) * self.scales[0][0]


class Blocks(nn.Module):
    """One after the other."""

    def __init__(self, width: int, apart: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, apart) for _ in range(BLOCKS))

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        for block in self.blocks:
            x_ND = block(x_ND)
        return x_ND


def made(width: int, apart: bool) -> steplab.UserModel:
    """Few weights, so that they are sent quickly."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * ROWS, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).abs().mean()

    def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
        weights = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(weights, **(implementation or {"fused": True}))

    return steplab.UserModel(Blocks(width, apart), batches, loss, ROWS, optimizer=adamw)


def faulty(width: int = 32) -> steplab.UserModel:
    """Every scale by itself."""
    return made(width, apart=True)


def clean(width: int = 32) -> steplab.UserModel:
    """The scales of a block together."""
    return made(width, apart=False)
