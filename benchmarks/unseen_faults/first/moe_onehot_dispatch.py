"""A mixture of experts with a fixed capacity per expert."""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, device, my_turn, pick

FAULT = {
    "NAME": "moe_onehot_dispatch",
    "CAUSE": "Tokens are sent to their experts by a product with a dense one-hot tensor (tokens x experts x capacity), which costs more FLOPs than the experts themselves.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Copy the rows to their slots by index (index_copy and index_select) instead of multiplying with zeros and ones.",
    "STYLE": "factory",
    "BATCH": 8,
}
WIDTH, INNER, EXPERTS, LAYERS, CONTEXT = (
    pick(1024, 16),
    pick(4096, 32),
    8,
    pick(4, 1),
    pick(1024, 8),
)


class Mixture(nn.Module):
    def __init__(self, onehot):
        super().__init__()
        self.onehot = onehot
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) * INNER**-0.5)

    def forward(self, residual):
        x = self.norm(residual).flatten(0, 1)
        capacity = 5 * 2 * x.shape[0] // (4 * EXPERTS)
        weight, expert = self.router(x).float().softmax(-1).topk(2, dim=-1)
        expert = expert.flatten()
        chosen = F.one_hot(expert, EXPERTS)
        place = (chosen.cumsum(0) - 1).gather(1, expert[:, None]).squeeze(1)
        kept = place < capacity
        combine = self.dense if self.onehot else self.indexed
        return residual + combine(x, expert, place, kept, weight, capacity).view_as(residual)

    def experts(self, rows):
        return torch.bmm(F.gelu(torch.bmm(rows, self.up)), self.down)

    def dense(self, x, expert, place, kept, weight, capacity):
        slot = F.one_hot(
            torch.where(kept, expert * capacity + place, EXPERTS * capacity), EXPERTS * capacity + 1
        )
        mask = slot[:, :-1].to(x.dtype).view(x.shape[0], 2, EXPERTS, capacity)
        rows = torch.einsum("tec,td->ecd", mask.sum(1), x)  # FAULT
        combine = (mask * weight.to(x.dtype)[:, :, None, None]).sum(1)
        return torch.einsum("tec,ecd->td", combine, self.experts(rows))

    def indexed(self, x, expert, place, kept, weight, capacity):
        slot = torch.where(kept, expert * capacity + place, EXPERTS * capacity)
        rows = x.new_zeros(EXPERTS * capacity + 1, WIDTH).index_copy(
            0, slot, x.repeat_interleave(2, dim=0)
        )
        out = self.experts(rows[:-1].view(EXPERTS, capacity, WIDTH)).view(-1, WIDTH)
        back = F.pad(out, (0, 0, 0, 1)).index_select(0, slot).view(-1, 2, WIDTH)
        return (back * weight.to(back.dtype)[:, :, None]).sum(1)


def batches(size):
    ready = [torch.randn(size, CONTEXT, WIDTH, device=device()) for _ in range(2)]
    while True:
        yield from ready


def loss(model, x):
    with torch.autocast(x.device.type, torch.bfloat16):
        return F.mse_loss(model(x[:, :-1]).float(), x[:, 1:])


def make(onehot):
    model = nn.Sequential(*[Mixture(onehot) for _ in range(LAYERS)])
    my_turn()
    return steplab.UserModel(
        model=model, batches=batches, loss=loss, optimizer=adamw, tokens_per_sequence=CONTEXT
    )


def faulty():
    return make(onehot=True)


def clean():
    return make(onehot=False)
