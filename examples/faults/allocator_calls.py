"""Memory given back: steplab profile examples/faults/allocator_calls.py:faulty

Every step gives all cached memory back to the driver and has to ask for it again. The clean twin
keeps it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab
from steplab.core.errors import Unsupported

rule = "allocator_calls"
where = "cuda"


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, rows: int, layers: int, tidy: bool) -> steplab.UserModel:
    """A stack of layers."""
    if not torch.cuda.is_available():
        raise Unsupported("This exhibit needs a GPU.", "Others show their fault on a CPU.")

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * rows, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        if tidy:
            torch.cuda.empty_cache()
        return model(x_ND).square().mean()

    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    return steplab.UserModel(model, batches, loss, rows, optimizer=adamw)


def faulty(width: int = 2048, rows: int = 1024, layers: int = 8) -> steplab.UserModel:
    """Given back."""
    return made(width, rows, layers, tidy=True)


def clean(width: int = 2048, rows: int = 1024, layers: int = 8) -> steplab.UserModel:
    """Kept."""
    return made(width, rows, layers, tidy=False)
