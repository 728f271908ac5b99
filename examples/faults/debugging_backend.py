"""A backend for debugging: steplab profile examples/faults/debugging_backend.py:faulty

The model is compiled with the backend that runs its graph op by op, left over from a hunt for an
error. The clean twin has the default one.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "compiled_not_faster"
where = "cpu"


class Stack(nn.Module):
    """Elementwise work, layer by layer."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(width) for _ in range(layers))

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        for scale_D in self.scales:
            x_ND = torch.sigmoid(torch.tanh(x_ND * scale_D) + 0.5 * x_ND) * x_ND
        return x_ND


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, rows: int, layers: int, backend: str) -> steplab.UserModel:
    """A stack of gates, compiled."""
    model = Stack(width, layers)
    model.compile(backend=backend)

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * rows, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).abs().mean()

    return steplab.UserModel(model, batches, loss, rows, optimizer=adamw)


def faulty(width: int = 64, rows: int = 512, layers: int = 6) -> steplab.UserModel:
    """Op by op."""
    return made(width, rows, layers, "eager")


def clean(width: int = 64, rows: int = 512, layers: int = 6) -> steplab.UserModel:
    """Fused."""
    return made(width, rows, layers, "inductor")
