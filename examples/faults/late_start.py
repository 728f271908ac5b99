"""Late start: steplab profile examples/faults/late_start.py:faulty --recipe cuda_graph=step

Thousands of operators on tiny tensors, replayed as a CUDA graph: the host is out of the way, and
the device takes longer to start a kernel than to run it. The clean twin does the same to larger
tensors in a fiftieth of the operators.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab
from steplab.core.errors import Unsupported

rule = "late_start"
where = "cuda"
recipes = {"faulty": ["cuda_graph=step"], "clean": ["cuda_graph=step"]}


class Steps(nn.Module):
    """Moves a state many times."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.pull = nn.Parameter(torch.zeros(width))
        self.times = times

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        for _ in range(self.times):
            x_ND = torch.sin(x_ND + self.pull)
        return x_ND


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, rows: int, times: int) -> steplab.UserModel:
    """Batches lie on the device, so that nothing else waits."""
    if not torch.cuda.is_available():
        raise Unsupported("This exhibit needs a GPU.", "Others show their fault on a CPU.")

    def batches(size: int) -> Iterator[Tensor]:
        device = "cuda"
        batch = torch.randn(size * rows, width, device=device)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).abs().mean()

    return steplab.UserModel(Steps(width, times), batches, loss, rows, optimizer=adamw)


def faulty(width: int = 8, rows: int = 1, times: int = 1000) -> steplab.UserModel:
    """Tiny and many."""
    return made(width, rows, times)


def clean(width: int = 4096, rows: int = 2048, times: int = 20) -> steplab.UserModel:
    """Large and few."""
    return made(width, rows, times)
