"""Gradients of an index: steplab profile examples/faults/index_gradient.py:faulty

Rows of a table are taken by table[ids], whose gradient is summed index by index. The clean twin
takes them by index_select.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab
from steplab.core.errors import Unsupported

rule = "index_gradient"
where = "cuda"


class Table(nn.Module):
    """Rows of a table, mixed."""

    def __init__(self, width: int, words: int, indexed: bool) -> None:
        super().__init__()
        self.table_WD = nn.Parameter(torch.randn(words, width))
        self.mix = nn.Linear(width, width)
        self.indexed = indexed

    def forward(self, ids_N: Tensor) -> Tensor:
        """Return (N, D)."""
        rows_ND = self.table_WD[ids_N] if self.indexed else self.table_WD.index_select(0, ids_N)
        return self.mix(rows_ND)


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, words: int, context: int, indexed: bool) -> steplab.UserModel:
    """One batch of ids, again and again."""
    if not torch.cuda.is_available():
        raise Unsupported("This exhibit needs a GPU.", "Others show their fault on a CPU.")

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randint(words, (size * context,))
        while True:
            yield batch

    def loss(model: nn.Module, ids_N: Tensor) -> Tensor:
        return model(ids_N).square().mean()

    return steplab.UserModel(Table(width, words, indexed), batches, loss, context, optimizer=adamw)


def faulty(width: int = 512, words: int = 1000, context: int = 65536) -> steplab.UserModel:
    """By an index."""
    return made(width, words, context, indexed=True)


def clean(width: int = 512, words: int = 1000, context: int = 65536) -> steplab.UserModel:
    """By index_select."""
    return made(width, words, context, indexed=False)
