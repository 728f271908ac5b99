"""The last block of this image classifier only pools: of its output the class token alone is read. It
runs with all tokens as queries all the same, so its queries, attention and feed-forward are computed
for 65 tokens of which one is used.
A good finding names the rows that are computed and dropped, and the line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 256,
    "CPU_BATCH": 8,
    "CAUSE": "the pooling block runs for every token although only the class token's row is used",
    "FIX": "give the pooling block the class token alone as its query",
}
SIDE, PATCH, CLASSES = by_device(224, 64), by_device(16, 8), 50
WIDTH, LAYERS, HEADS = by_device(768, 128), 2, by_device(12, 4)


class Block(nn.Module):
    """Attention from some tokens to all tokens, and a feed-forward."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, rows):
        b, t, _ = x.shape
        y = self.norm1(x)
        q = self.q(y[:, :rows]).view(b, rows, HEADS, -1).transpose(1, 2)
        k, v = self.kv(y).view(b, t, 2, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x[:, :rows] + self.proj(y.transpose(1, 2).reshape(b, rows, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.first = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(0.02 * torch.randn((SIDE // PATCH) ** 2 + 1, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.pool, self.head = Block(), nn.Linear(WIDTH, CLASSES)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x, x.shape[1])
        return self.head(self.pooled(x))

    def pooled(self, x):
        return self.pool(x, x.shape[1])[:, 0]  # guilty


class OneQuery(Classifier):
    def pooled(self, x):
        return self.pool(x, 1)[:, 0]


def build(model):
    my_turn()

    def batches(size):
        return in_turn(
            lambda: (
                torch.randn(size, 3, SIDE, SIDE, device=device()),
                torch.randint(CLASSES, (size,), device=device()),
            )
        )

    def loss(model, batch):
        images, labels = batch
        with mixed():
            return F.cross_entropy(model(images), labels)

    return steplab.UserModel(model(), batches, loss, unit="images")


def faulty():
    return build(Classifier)


def clean():
    return build(OneQuery)
