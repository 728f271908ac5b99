"""A window as a mask: steplab profile examples/faults/masked_scores.py:faulty

Every position attends to the 64 before it, and all scores are computed and masked. The clean twin
attends in blocks of 64, each with the block before it.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import steplab

rule = "masked_scores"
where = "cpu"
WINDOW = 64


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def band(queries: Tensor, keys: Tensor) -> Tensor:
    """Return which keys each query sees, as numbers that are added to the scores."""
    behind = queries[:, None] - keys[None, :]
    visible = (behind >= 0) & (behind < WINDOW)
    return torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))


class Windowed(nn.Module):
    """Attention to the last positions."""

    def __init__(self, width: int, heads: int, time: int, whole: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.whole = heads, whole
        place = torch.arange(time if whole else WINDOW)
        keys = place if whole else torch.arange(-WINDOW, WINDOW)
        self.register_buffer("mask", band(place, keys))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Mix positions of a window."""
        b, t, _ = x_BTD.shape
        q, k, v = self.qkv(x_BTD).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = (self.over_all if self.whole else self.in_blocks)(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))

    def over_all(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute all scores, and drop most."""
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)

    def in_blocks(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute those of two blocks; before the first there are zeros, which it sees too."""
        b, h, t, d = q.shape
        k, v = (
            F.pad(x, (0, 0, WINDOW, 0)).unfold(2, 2 * WINDOW, WINDOW).transpose(-1, -2)
            for x in (k, v)
        )
        q = q.unflatten(2, (-1, WINDOW))
        merged = (x.permute(0, 2, 1, 3, 4).flatten(0, 1) for x in (q, k, v))
        y = F.scaled_dot_product_attention(*merged, attn_mask=self.mask)
        return y.view(b, t // WINDOW, h, WINDOW, d).transpose(1, 2).reshape(b, h, t, d)


def made(width: int, heads: int, time: int, whole: bool) -> steplab.UserModel:
    """One layer."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size, time, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_BTD: Tensor) -> Tensor:
        return model(x_BTD).square().mean()

    model = Windowed(width, heads, time, whole)
    return steplab.UserModel(model, batches, loss, time, optimizer=adamw)


def faulty(width: int = 64, heads: int = 2, time: int = 1024) -> steplab.UserModel:
    """Over the whole square."""
    return made(width, heads, time, whole=True)


def clean(width: int = 64, heads: int = 2, time: int = 1024) -> steplab.UserModel:
    """In blocks."""
    return made(width, heads, time, whole=False)
