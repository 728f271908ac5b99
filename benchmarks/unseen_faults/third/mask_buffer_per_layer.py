"""Every layer registers a causal mask for the longest context that is possible, from the days before
fused attention, and no code reads it any more.
A good finding names the buffers as what holds most of the memory, and the line that registers them.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, mixed, my_turn, token_batches

FAULT = {
    "KIND": "memory",
    "STYLE": "factory",
    "BATCH": 4,
    "CPU_BATCH": 2,
    "CAUSE": "a causal mask of the maximal context in fp32 is a buffer of every layer and is never read",
    "FIX": "drop the buffer: attention is called with is_causal",
}
CONTEXT, LONGEST = by_device(1024, 128), by_device(16_384, 4096)
WIDTH, LAYERS, VOCAB = by_device(768, 128), by_device(12, 4), by_device(32_000, 2000)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, WIDTH // 64, 64).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class WithMask(Attention):
    def __init__(self):
        super().__init__()
        mask = torch.tril(torch.ones(LONGEST, LONGEST)).view(1, 1, LONGEST, LONGEST)
        self.register_buffer("bias", mask)  # guilty


class Model(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.attention = nn.ModuleList(attention() for _ in range(LAYERS))
        self.feed = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 4 * WIDTH),
                nn.GELU(),
                nn.Linear(4 * WIDTH, WIDTH),
            )
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight
        for attention, feed in zip(self.attention, self.feed, strict=True):
            x = x + attention(F.layer_norm(x, (WIDTH,)))
            x = x + feed(x)
        return self.head(x)


def build(attention):
    my_turn()

    def loss(model, ids):
        with mixed():
            return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    batches = token_batches(VOCAB, CONTEXT)
    return steplab.UserModel(Model(attention).to(device()), batches, loss, CONTEXT)


def faulty():
    return build(WithMask)


def clean():
    return build(Attention)
