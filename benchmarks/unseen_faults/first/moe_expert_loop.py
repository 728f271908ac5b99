"""A mixture of many small experts, routed to one expert per token."""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, device, my_turn, pick

FAULT = {
    "NAME": "moe_expert_loop",
    "CAUSE": "A Python loop over the experts looks up each one's tokens with torch.where, which waits for the GPU to learn how many there are, and launches small kernels expert by expert.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Sort the tokens by expert into slots of a fixed capacity and run all experts in one batched product.",
    "STYLE": "factory",
    "BATCH": 16,
}
WIDTH, INNER, EXPERTS, LAYERS, CONTEXT = (
    pick(1024, 16),
    pick(2048, 32),
    pick(32, 4),
    pick(4, 1),
    pick(1024, 8),
)


class Mixture(nn.Module):
    def __init__(self, loop):
        super().__init__()
        self.loop = loop
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) * INNER**-0.5)

    def forward(self, residual):
        x = self.norm(residual).flatten(0, 1)
        weight, expert = self.router(x).float().softmax(-1).max(dim=-1)
        out = self.one_by_one(x, expert) if self.loop else self.batched(x, expert)
        return residual + (out * weight[:, None]).view_as(residual)

    def one_by_one(self, x, expert):
        out = torch.zeros_like(x)
        for e, (up, down) in enumerate(zip(self.up.unbind(0), self.down.unbind(0), strict=True)):
            rows = torch.where(expert == e)[0]  # FAULT
            y = F.gelu(x.index_select(0, rows) @ up) @ down
            out.index_add_(0, rows, y.to(out.dtype))
        return out

    def batched(self, x, expert):
        capacity = 2 * x.shape[0] // EXPERTS
        place = (F.one_hot(expert, EXPERTS).cumsum(0) - 1).gather(1, expert[:, None]).squeeze(1)
        slot = torch.where(place < capacity, expert * capacity + place, EXPERTS * capacity)
        rows = x.new_zeros(EXPERTS * capacity + 1, WIDTH).index_copy(0, slot, x)
        rows = rows[:-1].view(EXPERTS, capacity, WIDTH)
        y = torch.bmm(F.gelu(torch.bmm(rows, self.up)), self.down).view(-1, WIDTH)
        return F.pad(y, (0, 0, 0, 1)).index_select(0, slot)


def batches(size):
    ready = [torch.randn(size, CONTEXT, WIDTH, device=device()) for _ in range(2)]
    while True:
        yield from ready


def loss(model, x):
    with torch.autocast(x.device.type, torch.bfloat16):
        return F.mse_loss(model(x[:, :-1]).float(), x[:, 1:])


def make(loop):
    model = nn.Sequential(*[Mixture(loop) for _ in range(LAYERS)])
    my_turn()
    return steplab.UserModel(
        model=model, batches=batches, loss=loss, optimizer=adamw, tokens_per_sequence=CONTEXT
    )


def faulty():
    return make(loop=True)


def clean():
    return make(loop=False)
