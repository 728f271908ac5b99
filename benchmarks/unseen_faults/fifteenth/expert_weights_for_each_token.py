"""A mixture of experts was first written for generating one token at a time, where it is fine to fetch
the weights of the chosen expert by an index. The same lines now train on thousands of tokens, and
fetch a whole weight matrix for every token. Sorted by expert, the tokens need each matrix once.
A good finding names the gathered copies of the experts' weights, one per token, and one of the two
lines.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import Block, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "the weights of the chosen expert are gathered once for every token",
    "FIX": "sort the tokens by expert and multiply group by group (grouped_mm)",
}
BATCH, CONTEXT, VOCAB = by_device(8, 4), by_device(256, 128), by_device(8192, 256)
WIDTH, LAYERS = by_device(256, 64), by_device(4, 4)
EXPERTS, HIDDEN = 8, by_device(256, 32)
DTYPE = torch.bfloat16 if device() == "cuda" else torch.float32


def token_by_token(x, chosen, up, down):
    hidden = torch.bmm(x[:, None], up[chosen])  # guilty
    return torch.bmm(F.gelu(hidden), down[chosen])[:, 0]


def expert_by_expert(x, chosen, up, down):
    experts, order = chosen.sort()
    numbers = torch.arange(EXPERTS, device=x.device)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    hidden = F.grouped_mm(x.index_select(0, order), up, offs=ends)
    y = F.grouped_mm(F.gelu(hidden), down, offs=ends)
    return torch.empty_like(y).index_copy_(0, order, y)


class Mixture(nn.Module):
    def __init__(self, through_experts):
        super().__init__()
        self.through_experts = through_experts
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * HIDDEN**-0.5)

    def forward(self, x):
        flat = self.norm(x).flatten(0, 1)
        gate, chosen = self.router(flat).float().softmax(-1).max(-1)
        up, down = self.up.to(DTYPE), self.down.to(DTYPE)
        y = self.through_experts(flat.to(DTYPE), chosen, up, down)
        return x + (gate[:, None] * y).view_as(x)


class Writer(nn.Module):
    def __init__(self, through_experts):
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        pairs = ((Block(WIDTH, WIDTH // 64), Mixture(through_experts)) for _ in range(LAYERS))
        self.layers = nn.Sequential(*(layer for pair in pairs for layer in pair))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        return self.head(self.norm(self.layers(self.embed(ids) + self.places.weight)))


def build(through_experts):
    model = Writer(through_experts).to(device())
    optimizer = adamw(model)

    def batch():
        ids = torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device())
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    data = in_turn(batch)

    def step():
        ids, labels = next(data)
        with mixed():
            loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(token_by_token)


def clean():
    return build(expert_by_expert)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
