"""fp32 matmuls: steplab profile examples/faults/fp32_matmul.py:faulty

Large matmuls in fp32 on a card with tensor cores. The clean twin casts them to bf16.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab
from steplab.core.errors import Unsupported

rule = "fp32_matmul"
where = "cuda"


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, rows: int, layers: int, half: bool) -> steplab.UserModel:
    """Square layers; batches lie on the device."""
    if not torch.cuda.is_available():
        raise Unsupported("This exhibit needs a GPU.", "Others show their fault on a CPU.")

    def batches(size: int) -> Iterator[Tensor]:
        device = "cuda"
        batch = torch.randn(size * rows, width, device=device)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        kind = x_ND.device.type
        with torch.autocast(kind, torch.bfloat16) if half else contextlib.nullcontext():
            return model(x_ND).float().abs().mean()

    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    return steplab.UserModel(model, batches, loss, rows, optimizer=adamw)


def faulty(width: int = 4096, rows: int = 4096, layers: int = 4) -> steplab.UserModel:
    """Twenty-four bits for every product."""
    return made(width, rows, layers, half=False)


def clean(width: int = 4096, rows: int = 4096, layers: int = 4) -> steplab.UserModel:
    """Eight bits."""
    return made(width, rows, layers, half=True)
