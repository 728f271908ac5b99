"""A mixture whose experts are modules, multiplied together by one batched product."""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, my_turn, next_token_loss, pick, token_batches

FAULT = {
    "NAME": "experts_stacked_each_step",
    "CAUSE": "The weights of 16 experts are parameters of their own and are stacked into one tensor in every forward; the backward cuts its gradient apart again.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Store the experts' weights as one parameter of shape (experts, width, inner) from the start.",
    "STYLE": "factory",
    "BATCH": 8,
    "WHY": "torch.stack copies every weight of every expert in fp32 in each step and the gradients are copied back one by one; one stacked parameter needs no copy.",
    "GAIN_MS": None,
}
WIDTH, LAYERS, HEADS = pick(1024, 32), pick(4, 1), pick(16, 2)
EXPERTS, INNER = pick(16, 2), pick(2048, 64)
CONTEXT, VOCAB = pick(1024, 16), pick(8192, 64)


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(WIDTH, EXPERTS)

    def forward(self, rows):
        weight, expert = self.scores(rows).float().softmax(-1).max(-1)
        capacity = -(-len(rows) * 5 // (4 * EXPERTS))
        member = F.one_hot(expert, EXPERTS)
        place = (member.cumsum(0) * member).sum(1) - 1
        slots = torch.where(place < capacity, expert * capacity + place, EXPERTS * capacity)
        return weight[:, None], slots, capacity


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(WIDTH, INNER) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(INNER, WIDTH) * INNER**-0.5)


class Mixture(nn.Module):
    def __init__(self, stacks):
        super().__init__()
        self.router, self.stacks = Router(), stacks
        experts = [Expert() for _ in range(EXPERTS)]
        if stacks:
            self.experts = nn.ModuleList(experts)
        else:
            self.up = nn.Parameter(torch.stack([e.up.data for e in experts]))
            self.down = nn.Parameter(torch.stack([e.down.data for e in experts]))

    def stacked(self, name):
        return torch.stack([getattr(expert, name) for expert in self.experts])  # FAULT

    def forward(self, x):
        rows = x.flatten(0, 1)
        weight, slots, capacity = self.router(rows)
        if self.stacks:
            up, down = self.stacked("up"), self.stacked("down")
        else:
            up, down = self.up, self.down
        room = rows.new_zeros(EXPERTS * capacity + 1, rows.shape[1]).index_copy(0, slots, rows)
        room = room[:-1].view(EXPERTS, capacity, -1)
        y = torch.bmm(F.gelu(torch.bmm(room, up)), down).flatten(0, 1)
        return (F.pad(y, (0, 0, 0, 1)).index_select(0, slots) * weight).view_as(x)


class Layer(nn.Module):
    def __init__(self, stacks):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mixture = Mixture(stacks)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        return x + self.mixture(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, stacks):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Layer(stacks) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make(stacks):
    torch.manual_seed(0)
    model = Decoder(stacks)
    my_turn()
    return steplab.UserModel(
        model=model,
        batches=token_batches(VOCAB, CONTEXT),
        loss=next_token_loss,
        optimizer=adamw,
    )


def faulty():
    return make(stacks=True)


def clean():
    return make(stacks=False)
