"""Power bound: steplab profile examples/faults/power_bound.py:faulty --steps 100

Products of 8,192 x 8,192 matrices in bf16, one after the other, draw more power than the card may:
it lowers its clock. In the clean twin the same card adds vectors, waits for its memory, and keeps
its clock. Nothing is wrong with either model; the note keeps figures of two machines apart.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab
from steplab.core.errors import Unsupported

rule = "power_bound"
where = "cuda"


class Products(nn.Module):
    """Multiplies by one matrix again and again, or by its diagonal."""

    def __init__(self, width: int, times: int, whole: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(width, dtype=torch.bfloat16))
        self.times, self.whole = times, whole

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        for _ in range(self.times):
            x_ND = x_ND @ self.weight if self.whole else x_ND * self.weight.diagonal()
        return x_ND


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, times: int, whole: bool) -> steplab.UserModel:
    """Batches lie on the device, so that nothing else waits."""
    if not torch.cuda.is_available():
        raise Unsupported("This exhibit needs a GPU.", "Others show their fault on a CPU.")

    def batches(size: int) -> Iterator[Tensor]:
        device = "cuda"
        batch = torch.randn(size * width, width, dtype=torch.bfloat16, device=device)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).float().abs().mean()

    return steplab.UserModel(Products(width, times, whole), batches, loss, width, optimizer=adamw)


def faulty(width: int = 8192, times: int = 16) -> steplab.UserModel:
    """Products that keep every tensor core busy."""
    return made(width, times, whole=True)


def clean(width: int = 8192, times: int = 16) -> steplab.UserModel:
    """A multiple of every column: the memory is busy, the tensor cores are not."""
    return made(width, times, whole=False)
