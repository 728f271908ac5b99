"""Unaligned matmuls: steplab profile examples/faults/unaligned_matmul.py:faulty

A head with a vocabulary of 50,257: its rows start at unaligned addresses. The clean twin has
50,304.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab
from steplab.core.errors import Unsupported

rule = "unaligned_matmul"
where = "cuda"


def made(width: int, rows: int, vocabulary: int) -> steplab.UserModel:
    """A head alone, in bf16; batches lie on the device."""
    if not torch.cuda.is_available():
        raise Unsupported("This exhibit needs a GPU.", "Others show their fault on a CPU.")

    def batches(size: int) -> Iterator[Tensor]:
        device = "cuda"
        batch = torch.randn(size * rows, width, device=device, dtype=torch.bfloat16)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).mean()

    def optimizer(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)

    model = nn.Sequential(
        nn.Linear(width, width, bias=False), nn.Linear(width, vocabulary, bias=False)
    ).bfloat16()
    return steplab.UserModel(model, batches, loss, rows, optimizer=optimizer)


def faulty(width: int = 2048, rows: int = 4096, vocabulary: int = 50_257) -> steplab.UserModel:
    """As many words as there are."""
    return made(width, rows, vocabulary)


def clean(width: int = 2048, rows: int = 4096, vocabulary: int = 50_304) -> steplab.UserModel:
    """The next multiple of 64."""
    return made(width, rows, vocabulary)
