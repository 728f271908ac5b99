"""Fragmentation: steplab profile examples/faults/fragmentation.py:faulty

A memory of past steps grows by one entry a step, in a new tensor each time: every old one leaves a
hole that the next, larger one does not fit. The clean twin reserves the whole memory once.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "fragmentation"
where = "cuda"

MOST_STEPS = 128


class Remembering(nn.Module):
    """A layer that keeps its outputs of all steps."""

    def __init__(self, width: int, rows: int, reserved: bool) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.step, self.reserved = 0, reserved
        shape = (MOST_STEPS if reserved else 0, rows, width)
        self.register_buffer("past_SND", torch.zeros(shape), persistent=False)

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        out_ND = self.mix(x_ND)
        if self.reserved:
            self.past_SND[self.step % MOST_STEPS] = out_ND.detach()
        else:
            self.past_SND = torch.cat([self.past_SND, out_ND.detach()[None]])
        self.step += 1
        return out_ND


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, rows: int, reserved: bool) -> steplab.Adopted:
    """Batches lie on the device."""

    def batches(size: int) -> Iterator[Tensor]:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        batch = torch.randn(size * rows, width, device=device)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).abs().mean()

    return steplab.Adopted(
        Remembering(width, 4 * rows, reserved), batches, loss, rows, optimizer=adamw
    )


def faulty(width: int = 1024, rows: int = 4096) -> steplab.Adopted:
    """Grows by 64 MiB a step."""
    return made(width, rows, reserved=False)


def clean(width: int = 1024, rows: int = 4096) -> steplab.Adopted:
    """Has its full size from the start."""
    return made(width, rows, reserved=True)
