"""Activation memory: steplab profile examples/faults/activation_memory.py:faulty

Blocks that keep all activations for backward, with a batch that nearly fills the device. The clean
twin checkpoints each block.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import steplab
from steplab.core.errors import Unsupported

rule = "activation_memory"
where = "cuda"

SHARE = 0.84  # of the device's memory, for activations
LAYERS = 16
KEPT = 9  # widths that a block saves per row: 1 before up, 4 before GELU, 4 before down


class Block(nn.Module):
    """Up, GELU, down."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        return x_ND + self.down(nn.functional.gelu(self.up(x_ND)))


class Stack(nn.Module):
    """Blocks, each of which may forget its insides."""

    def __init__(self, width: int, forget: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.forget = forget

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        for block in self.blocks:
            x_ND = checkpoint(block, x_ND, use_reentrant=False) if self.forget else block(x_ND)
        return x_ND


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, forget: bool) -> steplab.UserModel:
    """As many rows as fill the share of the device; they are on it already."""
    if not torch.cuda.is_available():
        raise Unsupported("This exhibit needs a GPU.", "Others show their fault on a CPU.")
    room = torch.cuda.mem_get_info()[1]
    rows = int(SHARE * room / (2 * KEPT * width * LAYERS)) // 64 * 16  # in bf16, four sequences

    def batches(size: int) -> Iterator[Tensor]:
        device = "cuda"
        batch = torch.randn(size * rows, width, device=device, dtype=torch.bfloat16)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).abs().mean()

    return steplab.UserModel(Stack(width, forget).bfloat16(), batches, loss, rows, optimizer=adamw)


def faulty(width: int = 1024) -> steplab.UserModel:
    """Keeps everything."""
    return made(width, forget=False)


def clean(width: int = 1024) -> steplab.UserModel:
    """Keeps what enters a block."""
    return made(width, forget=True)
