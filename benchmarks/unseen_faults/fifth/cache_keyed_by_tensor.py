"""Documents are packed, and the mask that keeps them apart is made by a function with an lru_cache
that was meant to save work. Its key is the batch's tensor, which is another one in every step: it
never hits, and the masks of all steps stay in memory.
A good finding names memory that grows with every step, and the line of the masks or the cache.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "a cache whose key is a tensor never hits and keeps the masks of all steps",
    "FIX": "no cache: the mask is needed once per step",
}
BATCH, TIME, WIDTH, HEADS = by_device(16, 8), by_device(2048, 512), by_device(512, 32), 4
VOCAB, END = 100, 0


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, mask):
        x = self.embed(ids)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype))
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))


def mask_of(ids):
    document = (ids == END).cumsum(1)
    allowed = (document[:, None] == document[:, :, None]).tril()
    return torch.zeros(allowed.shape, device=ids.device).masked_fill(~allowed, -torch.inf)[:, None]


def build(make_mask):
    model = Model().to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = in_turn(lambda: torch.randint(VOCAB, (BATCH, TIME + 1), device=device()))

    def step():
        both = next(tokens)
        ids, targets = both[:, :-1], both[:, 1:]
        mask = make_mask(ids)
        with mixed():
            loss = F.cross_entropy(model(ids, mask).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(cache(mask_of))  # guilty


def clean():
    return build(mask_of)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
