"""Exposed communication: steplab profile examples/faults/exposed_communication.py:faulty --ranks 2

Rank 0 sends a large table to all before each step computes, and they wait for it. In the clean twin
it comes while they compute, and they take it at the end.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

import steplab

rule = "exposed_communication"
where = "cpu"
ranks = 2

ROWS = 2048
TABLE = 8 << 20  # elements


class Exchanging(nn.Module):
    """Layers, and a table that rank 0 sends to all in every step."""

    def __init__(self, width: int, overlapped: bool) -> None:
        super().__init__()
        layers = [nn.Linear(width, width) for _ in range(4)]
        self.layers = nn.Sequential(*(part for layer in layers for part in (layer, nn.GELU())))
        self.register_buffer("table", torch.zeros(TABLE))
        self.overlapped = overlapped

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        if not dist.is_initialized():
            return self.layers(x_ND)
        work = dist.broadcast(self.table, 0, async_op=True)
        if not self.overlapped:
            work.wait()
        out_ND = self.layers(x_ND)
        if self.overlapped:
            work.wait()
        return out_ND


def made(width: int, overlapped: bool) -> steplab.UserModel:
    """Much to compute for few weights."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * ROWS, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).abs().mean()

    def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))

    return steplab.UserModel(Exchanging(width, overlapped), batches, loss, ROWS, optimizer=adamw)


def faulty(width: int = 128) -> steplab.UserModel:
    """Receive, then compute."""
    return made(width, overlapped=False)


def clean(width: int = 128) -> steplab.UserModel:
    """Receive while computing."""
    return made(width, overlapped=True)
