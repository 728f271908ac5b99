"""Fragmentation: steplab profile examples/faults/fragmentation.py:faulty

A layer evaluates its outputs at more temperatures every step, in a buffer of exactly that size:
each freed buffer is too small for the next. The clean twin allocates one buffer of the largest
size and uses part of it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab
from steplab.core.errors import Unsupported

rule = "fragmentation"
where = "cuda"
memory = "reserved_bytes"

MOST = 40  # temperatures


class Watched(nn.Module):
    """A layer that keeps the mean size of its outputs at a growing number of temperatures."""

    def __init__(self, width: int, rows: int, kept: bool) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.step, self.kept = 0, kept
        self.register_buffer("colder_K11", torch.linspace(0.1, 1, MOST)[:, None, None])
        self.register_buffer("buffer_KND", torch.empty((MOST if kept else 0, rows, width)))
        self.size = torch.zeros(())

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        out_ND = self.mix(x_ND)
        colder_K11 = self.colder_K11[: 1 + self.step % MOST]
        if not self.kept:
            self.buffer_KND = x_ND.new_empty(len(colder_K11), *out_ND.shape)
        scaled_KND = self.buffer_KND[: len(colder_K11)]
        torch.mul(colder_K11, out_ND.detach(), out=scaled_KND)
        self.size = scaled_KND[-1].mean()
        self.step += 1
        return out_ND


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, rows: int, kept: bool) -> steplab.UserModel:
    """Batches lie on the device."""
    if not torch.cuda.is_available():
        raise Unsupported("This exhibit needs a GPU.", "Others show their fault on a CPU.")

    def batches(size: int) -> Iterator[Tensor]:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        batch = torch.randn(size * rows, width, device=device, dtype=torch.bfloat16)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).abs().mean()

    model = Watched(width, 4 * rows, kept).to(torch.bfloat16)
    return steplab.UserModel(model, batches, loss, rows, optimizer=adamw)


def faulty(width: int = 4096, rows: int = 2048) -> steplab.UserModel:
    """A buffer of a new size every step, 64 MiB to 2.5 GiB: a larger one never fits an old one."""
    return made(width, rows, kept=False)


def clean(width: int = 4096, rows: int = 2048) -> steplab.UserModel:
    """One buffer of 2.5 GiB."""
    return made(width, rows, kept=True)
