"""A model of long sensor series uses linear attention: positive features of queries and keys in the
place of the softmax. But the products are taken in the order of ordinary attention, first queries
by keys, then by values. That makes a matrix of all pairs of moments in every head and layer, though
there is no softmax that would need it. Keys by values first gives a small matrix per head, and the
same result. The model is compiled; the compiler does not change the order of matrix products.
A good finding names the product that makes the matrix of all pairs (or the order of the two), and
its line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "linear attention multiplies queries by keys first, which is quadratic in the length of the series",
    "FIX": "multiply keys by values first: q @ (k.T @ v)",
}
BATCH, MOMENTS = by_device(16, 2), by_device(4096, 384)
SENSORS, WIDTH, HEAD, LAYERS = 12, by_device(512, 64), by_device(64, 32), by_device(6, 2)


class Attention(nn.Module):
    def __init__(self, pairs):
        super().__init__()
        self.pairs = pairs
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, w // HEAD, HEAD).permute(2, 0, 3, 1, 4)
        q, k = F.elu(q) + 1, (F.elu(k) + 1) / t
        if self.pairs:
            y = (q @ k.mT) @ v  # guilty
        else:
            y = q @ (k.mT @ v)
        y = y / (q @ k.sum(2).unsqueeze(-1))
        return self.out(y.transpose(1, 2).reshape(b, t, w))


class Layer(nn.Module):
    def __init__(self, pairs):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(pairs)
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.net(self.norm2(x))


class Series(nn.Module):
    def __init__(self, pairs):
        super().__init__()
        self.embed, self.head = nn.Linear(SENSORS, WIDTH), nn.Linear(WIDTH, SENSORS)
        self.positions = nn.Parameter(0.02 * torch.randn(MOMENTS, WIDTH))
        self.layers = nn.Sequential(*(Layer(pairs) for _ in range(LAYERS)))

    def forward(self, x):
        return self.head(self.layers(self.embed(x) + self.positions))


def build(pairs):
    model = Series(pairs).to(device())
    optimizer = adamw(model)
    compiled = torch.compile(model)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, MOMENTS, SENSORS, device=device()),
            torch.randn(BATCH, MOMENTS, SENSORS, device=device()),
        )
    )

    def step():
        broken, whole = next(data)
        with mixed():
            loss = F.mse_loss(compiled(broken), whole)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(pairs=True)


def clean():
    return build(pairs=False)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
