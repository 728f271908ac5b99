"""A causal mask as a tensor: steplab profile examples/faults/causal_mask.py:faulty

The collator returns an attention_mask of ones, and the model makes the usual mask of it: a number
for every query and key of every row. The clean twin says is_causal.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import steplab

rule = "attention_unfused"
where = "cpu"


class Block(nn.Module):
    """Attention to what came before."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads = heads

    def forward(self, x_BTD: Tensor, mask_B1TT: Tensor | None) -> Tensor:
        """Map (batch, time, width) to the same."""
        B, T, _ = x_BTD.shape
        q, k, v = self.qkv(self.norm(x_BTD)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        causal = {"is_causal": True} if mask_B1TT is None else {"attn_mask": mask_B1TT}
        mixed_BHTK = F.scaled_dot_product_attention(q, k, v, **causal)
        return x_BTD + self.out(mixed_BHTK.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """A stack of blocks."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))

    def forward(self, x_BTD: Tensor, mask_B1TT: Tensor | None) -> Tensor:
        """Map (batch, time, width) to the same."""
        for block in self.blocks:
            x_BTD = block(x_BTD, mask_B1TT)
        return x_BTD


def mask_of(kept_BT: Tensor) -> Tensor:
    """Return (batch, 1, time, time): the lowest number where a token must not look."""
    lowest, T = torch.finfo(torch.float32).min, kept_BT.shape[1]
    causal_TT = torch.full((T, T), lowest, device=kept_BT.device).triu(1)
    return causal_TT[None, None].masked_fill(kept_BT[:, None, None] == 0, lowest)


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, heads: int, layers: int, context: int, as_tensor: bool) -> steplab.UserModel:
    """Rows that are all full."""

    def batches(size: int) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield torch.randn(size, context, width), torch.ones(size, context)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x_BTD, kept_BT = batch
        return model(x_BTD, mask_of(kept_BT) if as_tensor else None).square().mean()

    return steplab.UserModel(Model(width, heads, layers), batches, loss, context, optimizer=adamw)


def faulty(
    width: int = 32, heads: int = 2, layers: int = 2, context: int = 1024
) -> steplab.UserModel:
    """Attention reads a mask."""
    return made(width, heads, layers, context, as_tensor=True)


def clean(
    width: int = 32, heads: int = 2, layers: int = 2, context: int = 1024
) -> steplab.UserModel:
    """Attention knows the mask."""
    return made(width, heads, layers, context, as_tensor=False)
