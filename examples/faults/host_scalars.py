"""Scalars from the host: steplab profile examples/faults/host_scalars.py:faulty

Every layer makes its constant factor a tensor on the device: a copy from the host for which the
host waits. The clean twin multiplies by the number.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab
from steplab.core.errors import Unsupported

rule = "host_scalars"
where = "cuda"


class Scaled(nn.Module):
    """A layer and a constant."""

    def __init__(self, width: int, copied: bool) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.copied = copied

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        factor = torch.tensor(0.5, device=x_ND.device) if self.copied else 0.5
        return self.mix(x_ND) * factor


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, rows: int, layers: int, copied: bool) -> steplab.UserModel:
    """A stack of such layers."""
    if not torch.cuda.is_available():
        raise Unsupported("This exhibit needs a GPU.", "Others show their fault on a CPU.")

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * rows, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).square().mean()

    model = nn.Sequential(*(Scaled(width, copied) for _ in range(layers)))
    return steplab.UserModel(model, batches, loss, rows, optimizer=adamw)


def faulty(width: int = 2048, rows: int = 1024, layers: int = 32) -> steplab.UserModel:
    """A copy per layer."""
    return made(width, rows, layers, copied=True)


def clean(width: int = 2048, rows: int = 1024, layers: int = 32) -> steplab.UserModel:
    """No copy."""
    return made(width, rows, layers, copied=False)
