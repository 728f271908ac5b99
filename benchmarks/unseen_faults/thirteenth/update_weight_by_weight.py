"""A diffusion transformer has about 170 weights, many of them small. Its AdamW was made with
foreach=False, once meant to save memory, so the update goes through the weights one by one, with
a dozen small operators for each. The fused update is a few launches for all of them.
A good finding names the update weight by weight (foreach=False) and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "AdamW with foreach=False updates the weights one by one, with a dozen small operators each",
    "FIX": "make the optimizer with fused=True",
}
BATCH, SIDE, CHANNELS, PATCH = by_device(64, 4), by_device(32, 8), 4, 2
WIDTH, LAYERS, HEADS, TIMES = by_device(384, 64), 16, by_device(6, 1), 1000


class Block(nn.Module):
    """Attention and feed-forward, scaled and shifted by the time."""

    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.time = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x, time):
        b, t, w = x.shape
        scale1, shift1, scale2, shift2 = self.time(time)[:, None].chunk(4, -1)
        y = torch.addcmul(shift1, self.norm1(x), 1 + scale1)
        q, k, v = self.qkv(y).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        y = torch.addcmul(shift2, self.norm2(x), 1 + scale2)
        return x + self.down(F.gelu(self.up(y)))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(CHANNELS * PATCH**2, WIDTH)
        self.positions = nn.Parameter(torch.randn((SIDE // PATCH) ** 2, WIDTH) * 0.02)
        self.times = nn.Embedding(TIMES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHANNELS * PATCH**2)

    def forward(self, latents, time):
        x = F.pixel_unshuffle(latents, PATCH).flatten(2).mT
        x, time = self.embed(x) + self.positions, F.silu(self.times(time))
        for block in self.blocks:
            x = block(x, time)
        side = SIDE // PATCH
        return F.pixel_shuffle(self.head(self.norm(x)).mT.unflatten(2, (side, side)), PATCH)


def one_by_one(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=False)  # guilty


def build(make):
    model = Denoiser().to(device())
    optimizer = make(model)
    keep = torch.linspace(1, 0.01, TIMES, device=device())
    data = in_turn(lambda: torch.randn(BATCH, CHANNELS, SIDE, SIDE, device=device()), 4)

    def step():
        latents = next(data)
        time = torch.randint(TIMES, (BATCH,), device=device())
        kept, noise = keep[time][:, None, None, None], torch.randn_like(latents)
        noised = kept.sqrt() * latents + (1 - kept).sqrt() * noise
        with mixed():
            loss = F.mse_loss(model(noised, time), noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(one_by_one)


def clean():
    return build(adamw)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
