"""Exposed communication: steplab profile examples/faults/exposed_communication.py:faulty --ranks 2

Rank 0 sends a table of 4 MiB to all before each step computes, and they wait for it: 34 ms over a
link of 1 Gbit/s. In the clean twin it comes while they compute, and they take it at the end.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from hardware.card import Layer
from hardware.link import slow_down
from torch import Tensor, nn

import steplab

rule = "exposed_communication"
where = "cpu"
ranks = 2

ROWS = 16
LAYERS = 4
LAYER_MS = 15.0
TABLE = 1 << 20  # elements


class Sending(nn.Module):
    """Layers, and a table that rank 0 sends to all in every step."""

    def __init__(self, width: int, overlapped: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(width, LAYER_MS) for _ in range(LAYERS)))
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
    """Few weights, so that their gradients are sent quickly."""
    slow_down()

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * ROWS, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).abs().mean()

    def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))

    return steplab.UserModel(Sending(width, overlapped), batches, loss, ROWS, optimizer=adamw)


def faulty(width: int = 32) -> steplab.UserModel:
    """Receive, then compute."""
    return made(width, overlapped=False)


def clean(width: int = 32) -> steplab.UserModel:
    """Receive while computing."""
    return made(width, overlapped=True)
