"""Small matmuls of single experts: steplab profile examples/faults/small_expert_matmuls.py:faulty

Sixty-four experts are called one after the other, each with a handful of tokens. The clean twin
gives every expert a slice of one tensor and runs all of them in one batched matmul.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import steplab

rule = "small_expert_matmuls"
where = "cpu"
# One step is thousands of operators; three would be too large a trace to keep for a test.
flags = {"faulty": ("--schedule", "1", "2", "1", "1")}

K = 2
ROOM = 1.25  # rows per expert over the mean


class Mixture(nn.Module):
    """A router and two matrices per expert, after a dense layer that all tokens pass."""

    def __init__(self, width: int, hidden: int, experts: int, loop: bool) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.router = nn.Linear(width, experts, bias=False)
        self.up_EDF = nn.Parameter(torch.randn(experts, width, hidden) / width**0.5)
        self.down_EFD = nn.Parameter(torch.randn(experts, hidden, width) / hidden**0.5)
        self.loop = loop

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return (T, D)."""
        x_TD = x_TD + self.dense(x_TD)
        weights_TK, experts_TK = self.router(x_TD).softmax(-1).topk(K)
        mix = self.one_by_one if self.loop else self.at_once
        return x_TD + mix(x_TD, weights_TK, experts_TK)

    def one_by_one(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """Every expert gathers, multiplies and scatters its own tokens."""
        out_TD = torch.zeros_like(x_TD)
        for expert, (up_DF, down_FD) in enumerate(zip(self.up_EDF, self.down_EFD, strict=True)):
            token, slot = (experts_TK == expert).nonzero(as_tuple=True)
            hidden_NF = F.gelu(x_TD[token] @ up_DF)
            weight_N1 = weights_TK[token, slot].unsqueeze(-1)
            out_TD = out_TD.index_add(0, token, hidden_NF @ down_FD * weight_N1)
        return out_TD

    def at_once(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """All experts have the same room; what does not fit is left out."""
        count = len(self.up_EDF)
        room = int(ROOM * experts_TK.numel() / count)
        expert_N, order_N = experts_TK.flatten().sort(stable=True)
        first_E = torch.searchsorted(expert_N, torch.arange(count, device=x_TD.device))
        place_N = torch.arange(len(expert_N), device=x_TD.device) - first_E[expert_N]
        weight_N1 = (weights_TK.flatten()[order_N] * (place_N < room)).unsqueeze(-1)
        slot_N, token_N = expert_N * room + place_N.clamp(max=room - 1), order_N // K
        rows_SD = x_TD.new_zeros(count * room, x_TD.shape[1]).index_copy_(0, slot_N, x_TD[token_N])
        hidden_ERF = F.gelu(torch.bmm(rows_SD.view(count, room, -1), self.up_EDF))
        done_SD = torch.bmm(hidden_ERF, self.down_EFD).flatten(0, 1)
        return torch.zeros_like(x_TD).index_add_(0, token_N, done_SD[slot_N] * weight_N1)


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, hidden: int, experts: int, context: int, loop: bool) -> steplab.UserModel:
    """One mixture on random tokens."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * context, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_TD: Tensor) -> Tensor:
        return model(x_TD).abs().mean()

    return steplab.UserModel(
        Mixture(width, hidden, experts, loop), batches, loss, context, optimizer=adamw
    )


def faulty(
    width: int = 128, hidden: int = 256, experts: int = 64, context: int = 128
) -> steplab.UserModel:
    """One after the other."""
    return made(width, hidden, experts, context, loop=True)


def clean(
    width: int = 128, hidden: int = 256, experts: int = 64, context: int = 128
) -> steplab.UserModel:
    """All at once."""
    return made(width, hidden, experts, context, loop=False)
