"""A language model whose feed-forward layers are mixtures of 16 experts, two for each token. Tokens are
put into a buffer with one row of slots per expert, and the experts run as batched products over it.
So that no token is ever dropped, every expert was given a slot for each token of the batch; nearly all
slots stay zero. A good finding names the products over padding, or the line that sets the capacity.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, mixed, token_batches

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 16,
    "CPU_BATCH": 6,
    "CAUSE": "each expert has slots for all tokens of the batch, so the experts compute mostly padding",
    "FIX": "set the capacity to the largest load of the batch, or to a small multiple of the mean load",
}
WIDTH, HIDDEN, LAYERS = by_device(1024, 96), by_device(2048, 192), by_device(3, 2)
CONTEXT, VOCAB = by_device(1024, 64), by_device(16_384, 128)
HEADS, EXPERTS, TOP = by_device(16, 3), 16, 2


def capacity_for_all(load, tokens):
    return tokens  # guilty


def capacity_by_load(load, tokens):
    return int(load.max())


class Mixture(nn.Module):
    def __init__(self, capacity):
        super().__init__()
        self.capacity = capacity
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN, device=device()) * WIDTH**-0.5)
        self.down = nn.Parameter(
            torch.randn(EXPERTS, HIDDEN, WIDTH, device=device()) * HIDDEN**-0.5
        )

    def forward(self, x):
        rows = x.flatten(0, 1)
        chances = self.router(rows).float().softmax(-1)
        gates, chosen = chances.topk(TOP, dim=-1)
        expert, order = chosen.flatten().sort(stable=True)
        load = torch.zeros(EXPERTS, dtype=torch.long, device=x.device)
        load.scatter_add_(0, expert, torch.ones_like(expert))
        place = torch.arange(len(expert), device=x.device) - (load.cumsum(0) - load)[expert]

        capacity = self.capacity(load, len(rows))
        slot, token = expert * capacity + place, order // TOP
        buffer = rows.new_zeros(EXPERTS * capacity, WIDTH).index_copy(0, slot, rows[token])
        hidden = F.gelu(torch.bmm(buffer.view(EXPERTS, capacity, WIDTH), self.up))
        out = torch.bmm(hidden, self.down).flatten(0, 1)[slot]
        out = out * gates.flatten()[order, None].to(out.dtype)
        mixed_rows = torch.zeros_like(out[: len(rows)]).index_add(0, token, out)
        balance = EXPERTS * (chances.mean(0) * load / len(expert)).sum()
        return mixed_rows.view_as(x), balance


class Block(nn.Module):
    def __init__(self, capacity):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mixture = Mixture(capacity)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        y, balance = self.mixture(self.norm2(x))
        return x + y, balance


class Model(nn.Module):
    def __init__(self, capacity):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(capacity) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.places.weight
        balances = []
        for block in self.blocks:
            x, balance = block(x)
            balances.append(balance)
        return self.head(self.norm(x)), torch.stack(balances).mean()


def loss(model, ids):
    with mixed():
        logits, balance = model(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) + 0.01 * balance


def build(capacity):
    return steplab.UserModel(Model(capacity), token_batches(VOCAB, CONTEXT), loss, optimizer=adamw)


def faulty():
    return build(capacity_for_all)


def clean():
    return build(capacity_by_load)
