"""Self-supervised images (SimCLR): the loss compares each of two views of every photo with all the others.
The table of cosines comes from F.cosine_similarity over broadcast pairs, as in a well-known tutorial,
which writes several tensors of (views, views, width); normalized codes and one product do the same.
A good finding names the cosine similarity of all pairs (tensors of pairs x width) and its line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "the cosines of all pairs are computed by broadcasting the codes against each other",
    "FIX": "normalize the codes and multiply: z @ z.T",
    "BATCH": 1024,
    "CPU_BATCH": 64,
}
SIDE, PATCH, CODE = by_device(64, 16), by_device(8, 4), 128
WIDTH, HEADS, LAYERS = by_device(256, 80), by_device(4, 2), by_device(6, 2)
WARMTH = 0.2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViewNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.places = nn.Parameter(0.02 * torch.randn((SIDE // PATCH) ** 2, WIDTH))
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, CODE))

    def forward(self, images):
        x = self.layers(self.stem(images).flatten(2).transpose(1, 2) + self.places)
        return self.head(x.mean(1))


def cosines_of_pairs(codes):
    return F.cosine_similarity(codes[:, None], codes[None], dim=-1)  # guilty


def cosines_by_product(codes):
    codes = F.normalize(codes, dim=1)
    return codes @ codes.T


def contrast(cosines):
    def loss(model, views):
        with mixed():
            codes = model(views.flatten(0, 1))
        table = cosines(codes.float()) / WARMTH
        table = table.masked_fill(
            torch.eye(len(table), dtype=torch.bool, device=table.device), -1e4
        )
        other = torch.arange(len(table), device=table.device).roll(len(table) // 2)
        return F.cross_entropy(table, other)

    return loss


def views(size):
    def batch():
        photos = torch.randn(1, size, 3, SIDE, SIDE, device=device())
        return photos + 0.3 * torch.randn(2, size, 3, SIDE, SIDE, device=device())

    return in_turn(batch, 4)


def faulty():
    return steplab.UserModel(ViewNet(), views, contrast(cosines_of_pairs), optimizer=adamw)


def clean():
    return steplab.UserModel(ViewNet(), views, contrast(cosines_by_product), optimizer=adamw)
