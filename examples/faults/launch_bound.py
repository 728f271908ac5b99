"""Launch-bound: steplab profile examples/faults/launch_bound.py:faulty

A deep stack of narrow layers: each kernel is over before the host has launched the next. The
clean twin replays the same kernels as a CUDA graph.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "launch_bound"
where = "cuda"


class Narrow(nn.Module):
    """Five small kernels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        return x_ND + torch.tanh(self.mix(self.norm(x_ND)))


class Stack(nn.Module):
    """Modules in a row. torch.compile looks into user code, but not into nn.Sequential's own."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        for part in self.parts:
            x_ND = part(x_ND)
        return x_ND


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, rows: int, layers: int, graphed: bool) -> steplab.Adopted:
    """A deep stack; batches lie on the device."""

    def batches(size: int) -> Iterator[Tensor]:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        batch = torch.randn(size * rows, width, device=device)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).abs().mean()

    model = Stack(*(Narrow(width) for _ in range(layers)))
    if graphed:
        model.compile(mode="reduce-overhead", dynamic=False)
    return steplab.Adopted(model, batches, loss, rows, optimizer=adamw)


def faulty(width: int = 256, rows: int = 64, layers: int = 64) -> steplab.Adopted:
    """Launched one by one."""
    return made(width, rows, layers, graphed=False)


def clean(width: int = 256, rows: int = 64, layers: int = 64) -> steplab.Adopted:
    """Launched as one."""
    return made(width, rows, layers, graphed=True)
