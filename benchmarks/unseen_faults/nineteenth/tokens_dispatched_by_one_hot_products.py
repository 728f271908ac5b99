"""A language model has mixtures of experts in the place of its feed-forward layers: each token goes to two
of eight experts, which have a fixed number of places. Tokens are brought to their places, and back, by
products with a (tokens, experts x places) matrix of zeros and ones, as in the first papers for TPUs.
That matrix is nearly all zeros, and the products grow with the square of the tokens. An index does it.
A good finding names the products with the dispatch matrix (or the one-hot matrix), and a line of them.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "tokens reach their experts and come back by products with one-hot matrices",
    "FIX": "gather and scatter the rows by index: index_copy into the places and y[slot] back",
    "BATCH": 8,
    "CPU_BATCH": 2,
}
CONTEXT, VOCAB = by_device(1024, 128), by_device(16_384, 256)
WIDTH, HIDDEN, LAYERS = by_device(512, 96), by_device(1024, 192), by_device(6, 3)
HEADS, EXPERTS, CHOSEN, ROOM = by_device(8, 2), 8, 2, 1.25


def by_products(x, slot, gate, places, experts):
    mask = F.one_hot(slot, places + 1)[..., :-1].to(x.dtype)
    put = mask.sum(1)
    back = (mask * gate[..., None]).sum(1)
    y = experts(put.T @ x)  # guilty
    return back @ y


def by_index(x, slot, gate, places, experts):
    source = x.new_zeros(places + 1, dtype=torch.long)
    held = x.new_zeros(places + 1, 1)
    token = torch.arange(len(x), device=x.device).repeat_interleave(CHOSEN)
    source[slot.flatten()] = token
    held[slot.flatten()] = 1
    y = experts(x[source[:-1]] * held[:-1])
    y = torch.cat([y, y.new_zeros(1, y.shape[1])])
    return (y[slot] * gate[..., None].to(y.dtype)).sum(1)


class Mixture(nn.Module):
    def __init__(self, carry):
        super().__init__()
        self.carry, self.router = carry, nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * HIDDEN**-0.5)

    def experts(self, rows):
        rows = F.gelu(torch.bmm(rows.view(EXPERTS, -1, WIDTH), self.up))
        return torch.bmm(rows, self.down).flatten(0, 1)

    def forward(self, x):
        flat = x.flatten(0, 1)
        room = int(ROOM * CHOSEN * len(flat) / EXPERTS)
        gate, expert = self.router(flat).float().softmax(-1).topk(CHOSEN)
        line = F.one_hot(expert.flatten(), EXPERTS).cumsum(0) - 1
        place = line.gather(1, expert.flatten()[:, None]).view_as(expert)
        slot = torch.where(place < room, expert * room + place, EXPERTS * room)
        return self.carry(flat, slot, gate, EXPERTS * room, self.experts).view_as(x)


class Layer(nn.Module):
    def __init__(self, carry):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mixture = Mixture(carry)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        return x + self.mixture(self.norm2(x))


class MixtureModel(nn.Module):
    def __init__(self, carry):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.Sequential(*(Layer(carry) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        return self.head(self.norm(self.layers(self.tokens(ids) + self.places.weight)))


def text(size):
    def batch():
        ids = torch.randint(VOCAB, (size, CONTEXT + 1), device=device())
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return in_turn(batch)


def loss(model, batch):
    ids, following = batch
    with mixed():
        return F.cross_entropy(model(ids).flatten(0, 1), following.flatten())


def faulty():
    return steplab.UserModel(MixtureModel(by_products), text, loss, optimizer=adamw)


def clean():
    return steplab.UserModel(MixtureModel(by_index), text, loss, optimizer=adamw)
