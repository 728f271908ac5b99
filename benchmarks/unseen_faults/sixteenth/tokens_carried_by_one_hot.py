"""A language model with a mixture of experts (one expert per token, a fixed room for each). As in the
first papers, tokens are brought to their experts and back by products with a one-hot matrix of tokens
by places. Almost all of it is zeros: what moves rows about costs as much as the experts themselves.
A good finding names the product with the one-hot (dispatch or combine) matrix and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import Block, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "tokens go to their experts and back by products with a one-hot matrix",
    "FIX": "move the rows by their index (index_copy and index_select)",
}
VOCAB, WIDTH, LAYERS = by_device(16_000, 500), by_device(512, 64), by_device(4, 2)
BATCH, CONTEXT, EXPERTS = by_device(16, 12), by_device(512, 64), by_device(16, 8)
ROOM = BATCH * CONTEXT * 5 // (4 * EXPERTS)
PLACES = EXPERTS * ROOM


class OneHot:
    def __init__(self, place, dtype):
        self.route = F.one_hot(place, PLACES + 1)[:, :PLACES].to(dtype)

    def there(self, tokens):
        return carried(self.route.T, tokens)

    def back(self, rows):
        return carried(self.route, rows)


def carried(route, rows):
    return route @ rows  # guilty


class Index:
    def __init__(self, place, dtype):
        self.place = place

    def there(self, tokens):
        rows = tokens.new_zeros(PLACES + 1, WIDTH)
        return rows.index_copy(0, self.place, tokens)[:PLACES]

    def back(self, rows):
        return F.pad(rows, (0, 0, 0, 1)).index_select(0, self.place)


class Mixture(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way = way
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 4 * WIDTH) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 4 * WIDTH, WIDTH) * (4 * WIDTH) ** -0.5)

    def forward(self, x):
        tokens = self.norm(x).flatten(0, 1)
        share, expert = self.router(tokens).float().softmax(-1).max(-1)
        chosen = F.one_hot(expert, EXPERTS)
        turn = (chosen.cumsum(0) * chosen).sum(-1) - 1
        place = torch.where(turn < ROOM, expert * ROOM + turn, PLACES)  # the last place is dropped
        way = self.way(place, tokens.dtype)
        rows = way.there(tokens).view(EXPERTS, ROOM, WIDTH)
        rows = torch.bmm(F.gelu(torch.bmm(rows, self.up)), self.down)
        return x + (way.back(rows.flatten(0, 1)) * share[:, None]).view_as(x)


class Attention(Block):
    def __init__(self):
        super().__init__(WIDTH, WIDTH // 32)
        del self.norm2, self.up, self.down

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.proj(y.transpose(1, 2).flatten(2))


def build(way):
    layers = [layer for _ in range(LAYERS) for layer in (Attention(), Mixture(way))]
    ends = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), *layers, *ends).to(device())
    optimizer = adamw(model)
    data = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device()))

    def step():
        ids = next(data)
        with mixed():
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(OneHot)


def clean():
    return build(Index)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
