"""Synchronization: steplab profile examples/faults/sync_in_loop.py:faulty

Every layer reads a number back to log it, so the host waits for the device in each layer. The
clean twin keeps the numbers on the device.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab
from steplab.core.errors import Unsupported

rule = "synchronization"
where = "cuda"


class Logged(nn.Module):
    """A stack of layers that keeps the mean size of its activations."""

    def __init__(self, width: int, layers: int, read_back: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.read_back = read_back
        self.sizes: list[float | Tensor] = []

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        self.sizes = []
        for layer in self.layers:
            x_ND = x_ND + torch.relu(layer(x_ND))
            size = x_ND.detach().abs().mean()
            self.sizes.append(size.item() if self.read_back else size)
        return x_ND


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, rows: int, layers: int, read_back: bool) -> steplab.UserModel:
    """Batches lie on the device, so that nothing else waits."""
    if not torch.cuda.is_available():
        raise Unsupported("This exhibit needs a GPU.", "Others show their fault on a CPU.")

    def batches(size: int) -> Iterator[Tensor]:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        batch = torch.randn(size * rows, width, device=device, dtype=torch.bfloat16)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).abs().mean()

    # A layer keeps an H200 busy for longer than its launches take: it is the waiting that costs
    # here, not the launching.
    model = Logged(width, layers, read_back).to(torch.bfloat16)
    return steplab.UserModel(model, batches, loss, rows, optimizer=adamw)


def faulty(width: int = 2048, rows: int = 2048, layers: int = 32) -> steplab.UserModel:
    """Waits in every layer."""
    return made(width, rows, layers, read_back=True)


def clean(width: int = 2048, rows: int = 2048, layers: int = 32) -> steplab.UserModel:
    """Never waits."""
    return made(width, rows, layers, read_back=False)
