"""A mixture of experts routed by a hash of the token, with room for so many tokens per expert."""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, my_turn, next_token_loss, pick, token_batches

FAULT = {
    "NAME": "capacity_too_large",
    "CAUSE": "Every expert has room for four times its fair share of the tokens, although the load is even: three quarters of the rows that the experts multiply are zeros.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "A capacity of 1.25 of the fair share, which nothing overflows here (or grouped products without padding).",
    "STYLE": "factory",
    "BATCH": 12,
    "WHY": "The batched products of the experts run over rows of padding; each expert gets about 1,536 rows of its 6,144, so a smaller capacity gives the same result for a third of the work.",
    "GAIN_MS": None,
}
WIDTH, LAYERS, HEADS = pick(1024, 32), pick(4, 1), pick(16, 2)
EXPERTS, INNER = pick(8, 2), pick(4096, 64)
CONTEXT, VOCAB = pick(1024, 16), pick(8192, 64)
TIGHT = pick(5, 8)  # in quarters of the fair share


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) * INNER**-0.5)

    def forward(self, x, slots, capacity):
        rows = x.flatten(0, 1)
        room = rows.new_zeros(EXPERTS * capacity + 1, rows.shape[1]).index_copy(0, slots, rows)
        room = room[:-1].view(EXPERTS, capacity, -1)
        y = torch.bmm(F.gelu(torch.bmm(room, self.up)), self.down).flatten(0, 1)
        return F.pad(y, (0, 0, 0, 1)).index_select(0, slots).view_as(x)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = Experts()

    def forward(self, x, slots, capacity):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        return x + self.experts(self.norm2(x), slots, capacity)


class HashMixture(nn.Module):
    def __init__(self, generous):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.generous = generous

    def route(self, ids):
        expert = ids.flatten() % EXPERTS
        fair = -(-len(expert) // EXPERTS)
        if self.generous:
            capacity = 4 * fair  # FAULT
        else:
            capacity = TIGHT * fair // 4
        member = F.one_hot(expert, EXPERTS)
        place = (member.cumsum(0) * member).sum(1) - 1
        slots = torch.where(place < capacity, expert * capacity + place, EXPERTS * capacity)
        return slots, capacity

    def forward(self, ids):
        slots, capacity = self.route(ids)
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, slots, capacity)
        return self.head(self.norm(x))


def make(generous):
    torch.manual_seed(0)
    model = HashMixture(generous)
    my_turn()
    return steplab.UserModel(
        model=model,
        batches=token_batches(VOCAB, CONTEXT),
        loss=next_token_loss,
        optimizer=adamw,
    )


def faulty():
    return make(generous=True)


def clean():
    return make(generous=False)
