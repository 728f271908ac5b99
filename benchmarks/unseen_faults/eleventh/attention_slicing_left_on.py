"""A small diffusion network: convolutions and attention between pixels. Attention slicing, meant
for sampling large pictures on small cards, was left on: every image and head is attended to on its
own in a Python loop and written into a slice of the result.
A good finding names the loop that attends slice by slice.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "attention runs slice by slice in a Python loop, one image and head at a time",
    "FIX": "call scaled_dot_product_attention on the whole batch",
}
BATCH, SIDE, CHANNELS, HEADS = by_device(64, 20), by_device(32, 8), by_device(256, 48), 4


def sliced(q, k, v):
    scale = q.shape[-1] ** -0.5
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            out[b, h] = (q[b, h] @ k[b, h].T * scale).softmax(-1) @ v[b, h]  # guilty
    return out


class Block(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.norm1, self.norm2 = nn.GroupNorm(8, CHANNELS), nn.GroupNorm(8, CHANNELS)
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.time = nn.Linear(CHANNELS, CHANNELS)
        self.qkv = nn.Conv2d(CHANNELS, 3 * CHANNELS, 1)
        self.proj = nn.Conv2d(CHANNELS, CHANNELS, 1)

    def forward(self, x, t):
        x = x + self.conv(F.silu(self.norm1(x) + self.time(t)[:, :, None, None]))
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm2(x)).view(b, 3, HEADS, c // HEADS, h * w).mT.unbind(1)
        return x + self.proj(self.attend(q, k, v).mT.reshape(b, c, h, w))


class Net(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.times = nn.Embedding(1000, CHANNELS)
        self.inside = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.blocks = nn.ModuleList(Block(attend) for _ in range(2))
        self.outside = nn.Conv2d(CHANNELS, 3, 3, padding=1)

    def forward(self, x, time):
        x, t = self.inside(x), self.times(time)
        for block in self.blocks:
            x = block(x, t)
        return self.outside(x)


def build(attend):
    model = Net(attend).to(device())
    optimizer = adamw(model)
    alpha = torch.linspace(0.999, 0.01, 1000, device=device())

    def batch():
        images, noise = torch.randn(2, BATCH, 3, SIDE, SIDE, device=device())
        return images, noise, torch.randint(1000, (BATCH,), device=device())

    data = in_turn(batch)

    def step():
        images, noise, time = next(data)
        keep = alpha[time][:, None, None, None]
        noisy = keep.sqrt() * images + (1 - keep).sqrt() * noise
        with mixed():
            guess = model(noisy, time)
        loss = F.mse_loss(guess.float(), noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(sliced)


def clean():
    return build(F.scaled_dot_product_attention)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
