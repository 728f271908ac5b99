"""Launch-bound: steplab profile examples/faults/launch_bound.py:faulty

A deep stack of narrow layers: each kernel finishes before the host has launched the next. The
clean twin is the same with the recipe cuda_graph=step: one launch for everything.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab
from steplab.core.errors import Unsupported

rule = "launch_bound"
where = "cuda"
recipes = {"clean": ("cuda_graph=step",)}


class Narrow(nn.Module):
    """Five small kernels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        return x_ND + torch.tanh(self.mix(self.norm(x_ND)))


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def faulty(width: int = 256, rows: int = 64, layers: int = 64) -> steplab.UserModel:
    """A deep stack; batches lie on the device."""
    if not torch.cuda.is_available():
        raise Unsupported("This exhibit needs a GPU.", "Others show their fault on a CPU.")

    def batches(size: int) -> Iterator[Tensor]:
        device = "cuda"
        batch = torch.randn(size * rows, width, device=device, dtype=torch.bfloat16)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).abs().mean()

    model = nn.Sequential(*(Narrow(width) for _ in range(layers))).to(torch.bfloat16)
    return steplab.UserModel(model, batches, loss, rows, optimizer=adamw)


clean = faulty
