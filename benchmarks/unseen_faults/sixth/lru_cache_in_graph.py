"""The distances of a bias of attention are bucketed by a function with lru_cache, so that they are
computed once. The compiler looks through the cache: its graph computes them again in every block and
every step.
A good finding names the computing of the buckets inside the compiled blocks, from no input of the
step, and the line of the call or of the function.
"""

import functools
import math

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 8,
    "CPU_BATCH": 1,
    "CAUSE": "torch.compile ignores lru_cache: the buckets of all pairs are computed in every block and step",
    "FIX": "compute them outside the compiled blocks and keep them as a buffer",
}
TIME, WIDTH, LAYERS, HEADS = by_device(512, 512), by_device(512, 32), by_device(8, 4), 1
CLASSES, NEAR, BUCKETS, FAR = 16, 16, 64, 1000


def compute_buckets(where):
    apart = (where[None] - where[:, None]).abs()
    log = (apart.clamp(min=1).float() / NEAR).log() / math.log(FAR / NEAR)
    far = (NEAR + log * (BUCKETS - NEAR)).long().clamp(max=BUCKETS - 1)
    return torch.where(apart < NEAR, apart, far)


@functools.lru_cache
def cached_buckets(kind):
    return compute_buckets(torch.arange(TIME, device=kind))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        slopes = torch.linspace(0, -4, BUCKETS)
        self.register_buffer("slopes", slopes, persistent=False)
        buckets = compute_buckets(torch.arange(TIME))
        self.register_buffer("buckets", buckets, persistent=False)
        self.compile()

    def attend(self, x, buckets):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        bias = self.slopes[buckets].to(q.dtype)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return x + self.out(y.transpose(1, 2).reshape(b, t, w))


class Cached(Block):
    def forward(self, x):
        return self.attend(x, cached_buckets(x.device.type))  # guilty


class Buffered(Block):
    def forward(self, x):
        return self.attend(x, self.buckets)


class Encoder(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.embed, self.head = nn.Linear(32, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.Sequential(*(block() for _ in range(LAYERS)))

    def forward(self, x):
        return self.head(self.blocks(self.embed(x)).mean(1))


def build(block):
    my_turn()

    def batches(size):
        return in_turn(
            lambda: (
                torch.randn(size, TIME, 32, device=device()),
                torch.randint(CLASSES, (size,), device=device()),
            )
        )

    def loss(model, batch):
        with mixed():
            return F.cross_entropy(model(batch[0]), batch[1])

    return steplab.UserModel(Encoder(block), batches, loss, TIME)


def faulty():
    return build(Cached)


def clean():
    return build(Buffered)
