"""A compiled model that is passed by: steplab profile examples/faults/uncalled_compile.py:faulty

The model is given to torch.compile, but the loss calls a method of it; only forward is compiled.
The clean twin calls the compiled model.
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

    def encode(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        for scale_D in self.scales:
            x_ND = torch.sigmoid(torch.tanh(x_ND * scale_D) + 0.5 * x_ND) * x_ND
        return x_ND

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        return self.encode(x_ND)


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, rows: int, layers: int, called: bool) -> steplab.UserModel:
    """A stack of gates, compiled."""
    model = Stack(width, layers)
    compiled = torch.compile(model)

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * rows, width)
        while True:
            yield batch

    def loss(_: nn.Module, x_ND: Tensor) -> Tensor:
        out_ND = compiled(x_ND) if called else compiled.encode(x_ND)
        return out_ND.abs().mean()

    return steplab.UserModel(model, batches, loss, rows, optimizer=adamw)


def faulty(width: int = 64, rows: int = 512, layers: int = 6) -> steplab.UserModel:
    """Its method."""
    return made(width, rows, layers, called=False)


def clean(width: int = 64, rows: int = 512, layers: int = 6) -> steplab.UserModel:
    """Itself."""
    return made(width, rows, layers, called=True)
