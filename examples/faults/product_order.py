"""Products in a costly order: steplab profile examples/faults/product_order.py:faulty

Linear attention multiplies queries and keys first, which makes the matrix that it is there to
avoid. The clean twin multiplies keys and values first.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "product_order"
where = "cpu"


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


class Linear(nn.Module):
    """Attention without a softmax."""

    def __init__(self, width: int, quadratic: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.quadratic = quadratic

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return (B, T, D)."""
        q_BTD, k_BTD, v_BTD = self.qkv(x_BTD).chunk(3, dim=-1)
        k_BDT = k_BTD.transpose(1, 2)
        out = (q_BTD @ k_BDT) @ v_BTD if self.quadratic else q_BTD @ (k_BDT @ v_BTD)
        return out / x_BTD.shape[1]


def made(width: int, context: int, layers: int, quadratic: bool) -> steplab.UserModel:
    """A stack of such layers."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size, context, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_BTD: Tensor) -> Tensor:
        return model(x_BTD).square().mean()

    model = nn.Sequential(*(Linear(width, quadratic) for _ in range(layers)))
    return steplab.UserModel(model, batches, loss, context, optimizer=adamw)


def faulty(width: int = 32, context: int = 512, layers: int = 2) -> steplab.UserModel:
    """Queries by keys first."""
    return made(width, context, layers, quadratic=True)


def clean(width: int = 32, context: int = 512, layers: int = 2) -> steplab.UserModel:
    """Keys by values first."""
    return made(width, context, layers, quadratic=False)
