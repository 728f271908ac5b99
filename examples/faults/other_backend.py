"""Wrong backend: steplab profile examples/faults/other_backend.py:faulty \
--recipe impl.attention=math

Attention was compiled once under flash. A context manager such as sdpa_kernel(...) is neither
guarded nor part of the compile cache key, so asking for math still runs flash. The clean twin is
not compiled.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import steplab

rule = "other_backend"
where = "cpu"
recipes = {"faulty": ("impl.attention=math",), "clean": ("impl.attention=math",)}

# An older cache may have been filled by math, which flash would then get.
UNCACHED = {"fx_graph_cache": False}
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}


def attend(qkv_BTHd: Tensor) -> Tensor:
    """Self-attention of one tensor with itself, (B, H, T, d)."""
    x_BHTd = qkv_BTHd.transpose(1, 2)
    return F.scaled_dot_product_attention(x_BHTd, x_BHTd, x_BHTd, is_causal=True)


class Attention(nn.Module):
    """Declares its op, so that a recipe can choose the implementation."""

    op = "attention"

    def __init__(self, width: int, heads: int, compiled: bool) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width))
        self.heads, self.impl, self.ran = heads, "flash", ""
        self.attend = torch.compile(attend, options=UNCACHED) if compiled else attend

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return (B, T, D)."""
        x_BTHd = self.mix(x_BTD).unflatten(-1, (self.heads, -1))
        if not self.ran:  # it has been used before, by whoever had flash
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                self.attend(x_BTHd)
        self.ran = self.impl
        with sdpa_kernel(BACKENDS[self.impl]):
            mixed_BHTd = self.attend(x_BTHd)
        return x_BTD + mixed_BHTd.transpose(1, 2).flatten(-2)


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, heads: int, context: int, compiled: bool) -> steplab.UserModel:
    """One layer."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(16 * size, context, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_BTD: Tensor) -> Tensor:
        return model(x_BTD).abs().mean()

    model = Attention(width, heads, compiled)
    return steplab.UserModel(model, batches, loss, 16 * context, optimizer=adamw)


def faulty(width: int = 128, heads: int = 8, context: int = 24) -> steplab.UserModel:
    """A compiled graph that keeps its kernel."""
    return made(width, heads, context, compiled=True)


def clean(width: int = 128, heads: int = 8, context: int = 24) -> steplab.UserModel:
    """Does as it is asked."""
    return made(width, heads, context, compiled=False)
