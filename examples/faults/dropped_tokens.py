"""Dropped tokens: steplab profile examples/faults/dropped_tokens.py:faulty

The experts have capacity for half of the tokens that the router assigns. The clean twin has a
capacity factor of 1.25.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import steplab

rule = "dropped_tokens"
where = "cpu"

K = 2


class Mixture(nn.Module):
    """Experts with fixed room."""

    def __init__(self, width: int, hidden: int, experts: int, factor: float) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up_EDF = nn.Parameter(torch.randn(experts, width, hidden) / width**0.5)
        self.down_EFD = nn.Parameter(torch.randn(experts, hidden, width) / hidden**0.5)
        self.factor = factor

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return (T, D); tokens without room pass as they are."""
        count = len(self.up_EDF)
        weights_TK, experts_TK = self.router(x_TD).softmax(-1).topk(K)
        room = int(self.factor * experts_TK.numel() / count)
        expert_N, order_N = experts_TK.flatten().sort(stable=True)
        first_E = torch.searchsorted(expert_N, torch.arange(count, device=x_TD.device))
        place_N = torch.arange(len(expert_N), device=x_TD.device) - first_E[expert_N]
        weight_N1 = (weights_TK.flatten()[order_N] * (place_N < room)).unsqueeze(-1)
        slot_N, token_N = expert_N * room + place_N.clamp(max=room - 1), order_N // K
        rows_SD = x_TD.new_zeros(count * room, x_TD.shape[1]).index_copy_(0, slot_N, x_TD[token_N])
        hidden_ERF = F.gelu(torch.bmm(rows_SD.view(count, room, -1), self.up_EDF))
        done_SD = torch.bmm(hidden_ERF, self.down_EFD).flatten(0, 1)
        mixed_TD = torch.zeros_like(x_TD).index_add_(0, token_N, done_SD[slot_N] * weight_N1)
        return x_TD + mixed_TD


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, hidden: int, experts: int, context: int, factor: float) -> steplab.UserModel:
    """One mixture on random tokens."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * context, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_TD: Tensor) -> Tensor:
        return model(x_TD).abs().mean()

    return steplab.UserModel(
        Mixture(width, hidden, experts, factor), batches, loss, context, optimizer=adamw
    )


def faulty(
    width: int = 128, hidden: int = 512, experts: int = 8, context: int = 256
) -> steplab.UserModel:
    """Room for half."""
    return made(width, hidden, experts, context, factor=0.5)


def clean(
    width: int = 128, hidden: int = 512, experts: int = 8, context: int = 256
) -> steplab.UserModel:
    """Room for a quarter more than an even share."""
    return made(width, hidden, experts, context, factor=1.25)
