"""A compiled transformer classifies point clouds of uneven sizes. After each half of a layer the states of
padding are set to zero, "only if there is padding": `if padding.any()` reads a tensor in Python, which
breaks the compiled graph there and waits for the device, twice in every layer.
A good finding names the branch on a tensor (graph breaks or synchronizations) and its line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "a Python branch on a tensor breaks the compiled graph in every layer and waits for the device",
    "FIX": "apply masked_fill always, without the branch",
}
BATCH, POINTS, KINDS = by_device(32, 2), by_device(512, 64), 40
WIDTH, HEADS, LAYERS = by_device(384, 48), by_device(6, 2), by_device(20, 28)


def hush_if_any(x, padding):
    if padding.any():  # guilty
        x = x.masked_fill(padding.unsqueeze(2), 0)
    return x


def hush(x, padding):
    return x.masked_fill(padding.unsqueeze(2), 0)


class Layer(nn.Module):
    def __init__(self, quiet):
        super().__init__()
        self.quiet = quiet
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, padding):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=~padding[:, None, None])
        x = self.quiet(x + self.proj(y.transpose(1, 2).flatten(2)), padding)
        return self.quiet(x + self.down(F.gelu(self.up(self.norm2(x)))), padding)


class CloudNet(nn.Module):
    def __init__(self, quiet):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(3, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.layers = nn.ModuleList(Layer(quiet) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, KINDS)

    def forward(self, points, padding):
        x = self.stem(points)
        for layer in self.layers:
            x = layer(x, padding)
        return self.head(x.sum(1) / (~padding).sum(1, keepdim=True))


def build(quiet):
    model = CloudNet(quiet).to(device())
    optimizer = adamw(model)
    compiled = torch.compile(model)

    def clouds():
        sizes = torch.randint(POINTS // 2, POINTS + 1, (BATCH, 1), device=device())
        padding = torch.arange(POINTS, device=device()) >= sizes
        points = torch.randn(BATCH, POINTS, 3, device=device())
        return points, padding, torch.randint(KINDS, (BATCH,), device=device())

    data = in_turn(clouds)

    def step():
        points, padding, kinds = next(data)
        with mixed():
            loss = F.cross_entropy(compiled(points, padding), kinds)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(hush_if_any)


def clean():
    return build(hush)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
