"""Expert imbalance: steplab profile examples/faults/expert_imbalance.py:faulty

The router prefers two experts, and all experts are padded to the busiest one. The clean twin's
router prefers none.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import steplab

rule = "expert_imbalance"
where = "cpu"

K = 2


class Mixture(nn.Module):
    """Experts that are padded to the one with most tokens."""

    def __init__(self, width: int, hidden: int, experts: int, favor: float) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up_EDF = nn.Parameter(torch.randn(experts, width, hidden) / width**0.5)
        self.down_EFD = nn.Parameter(torch.randn(experts, hidden, width) / hidden**0.5)
        self.register_buffer("favor_E", torch.tensor([favor] * K + [0.0] * (experts - K)))

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return (T, D)."""
        count = len(self.up_EDF)
        weights_TK, experts_TK = (self.router(x_TD) + self.favor_E).softmax(-1).topk(K)
        expert_N, order_N = experts_TK.flatten().sort(stable=True)
        load_E = torch.bincount(expert_N, minlength=count)
        room = int(load_E.max())
        first_E = load_E.cumsum(0) - load_E
        slot_N = expert_N * room + torch.arange(len(expert_N), device=x_TD.device)
        slot_N, token_N = slot_N - first_E[expert_N], order_N // K
        rows_SD = x_TD.new_zeros(count * room, x_TD.shape[1]).index_copy_(0, slot_N, x_TD[token_N])
        hidden_ERF = F.gelu(torch.bmm(rows_SD.view(count, room, -1), self.up_EDF))
        done_SD = torch.bmm(hidden_ERF, self.down_EFD).flatten(0, 1)
        weight_N1 = weights_TK.flatten()[order_N].unsqueeze(-1)
        mixed_TD = torch.zeros_like(x_TD).index_add_(0, token_N, done_SD[slot_N] * weight_N1)
        return x_TD + mixed_TD


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, hidden: int, experts: int, context: int, favor: float) -> steplab.UserModel:
    """One mixture on random tokens."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * context, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_TD: Tensor) -> Tensor:
        return model(x_TD).abs().mean()

    return steplab.UserModel(
        Mixture(width, hidden, experts, favor), batches, loss, context, optimizer=adamw
    )


def faulty(
    width: int = 128, hidden: int = 512, experts: int = 8, context: int = 256
) -> steplab.UserModel:
    """Two experts take nearly everything."""
    return made(width, hidden, experts, context, favor=3.0)


def clean(
    width: int = 128, hidden: int = 512, experts: int = 8, context: int = 256
) -> steplab.UserModel:
    """All experts take about the same."""
    return made(width, hidden, experts, context, favor=0.0)
