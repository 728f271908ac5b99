"""Fragmentation: steplab profile examples/faults/fragmentation.py:faulty

A layer looks at its outputs in a buffer of exactly the size of this step's share of them, and the
shares grow: every buffer that is given back is too small for the next one. The clean twin has one
buffer of the largest size and uses a part of it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "fragmentation"
where = "cuda"
memory = "reserved_bytes"

SHARES = 40  # sizes, one after the other


class Watched(nn.Module):
    """A layer that keeps the mean size of a growing share of its outputs."""

    def __init__(self, width: int, rows: int, kept: bool) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.step = 0
        buffer_ND = torch.empty((rows if kept else 0, width))
        self.register_buffer("buffer_ND", buffer_ND, persistent=False)
        self.size = torch.zeros(())

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        out_ND = self.mix(x_ND)
        share = len(out_ND) * (1 + self.step % SHARES) // SHARES
        part_ND = out_ND.detach()[:share]
        own = len(self.buffer_ND) == 0
        buffer_ND = torch.empty_like(part_ND) if own else self.buffer_ND[:share]
        self.size = torch.abs(part_ND, out=buffer_ND).mean()
        self.step += 1
        return out_ND


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, rows: int, kept: bool) -> steplab.Adopted:
    """Batches lie on the device."""

    def batches(size: int) -> Iterator[Tensor]:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        batch = torch.randn(size * rows, width, device=device, dtype=torch.bfloat16)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).abs().mean()

    model = Watched(width, 4 * rows, kept).to(torch.bfloat16)
    return steplab.Adopted(model, batches, loss, rows, optimizer=adamw)


def faulty(width: int = 4096, rows: int = 16384) -> steplab.Adopted:
    """A buffer of a new size every step, 512 MiB in the end."""
    return made(width, rows, kept=False)


def clean(width: int = 4096, rows: int = 16384) -> steplab.Adopted:
    """One buffer of 512 MiB."""
    return made(width, rows, kept=True)
