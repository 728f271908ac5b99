"""Copies written out: steplab profile examples/faults/written_out.py:faulty

Eight query heads share one head of keys and values, which is repeated for each of them. The clean
twin expands it: attention takes the view as it is.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import steplab

rule = "written_out"
where = "cpu"


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


class Shared(nn.Module):
    """Attention whose heads have queries of their own, and keys and values together."""

    def __init__(self, width: int, heads: int, repeat: bool) -> None:
        super().__init__()
        self.heads, self.repeat = heads, repeat
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * width // heads)
        self.out = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return (B, T, D)."""
        q_BHTd = self.q(x_BTD).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        kv_B1Td = (part[:, None] for part in self.kv(x_BTD).chunk(2, -1))
        k_BHTd, v_BHTd = (
            one.repeat(1, self.heads, 1, 1) if self.repeat else one.expand_as(q_BHTd)
            for one in kv_B1Td
        )
        y_BHTd = F.scaled_dot_product_attention(q_BHTd, k_BHTd, v_BHTd)
        return self.out(y_BHTd.transpose(1, 2).flatten(2))


def made(width: int, heads: int, time: int, repeat: bool) -> steplab.UserModel:
    """One layer."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size, time, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_BTD: Tensor) -> Tensor:
        return model(x_BTD).square().mean()

    return steplab.UserModel(Shared(width, heads, repeat), batches, loss, time, optimizer=adamw)


def faulty(width: int = 128, heads: int = 8, time: int = 512) -> steplab.UserModel:
    """Repeats keys and values."""
    return made(width, heads, time, repeat=True)


def clean(width: int = 128, heads: int = 8, time: int = 512) -> steplab.UserModel:
    """Expands them."""
    return made(width, heads, time, repeat=False)
