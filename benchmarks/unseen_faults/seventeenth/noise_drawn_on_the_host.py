"""A transformer over the patches of short videos is trained as a diffusion model. The noise of each batch is
drawn by torch.randn without a device, so the host draws millions of numbers in every step, and copies
them to the GPU after that. It shows on a GPU alone: on a CPU both twins do the same.
A good finding names the noise that is made on the host and the line that draws and copies it.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the noise of the diffusion is drawn on the host and copied to the device",
    "FIX": "draw it on the device: torch.randn_like(clips)",
}
BATCH, FRAMES, SIDE = by_device(32, 4), by_device(16, 4), by_device(128, 32)
DEEP, PATCH = 2, by_device(16, 8)
WIDTH, HEADS, LAYERS = by_device(768, 192), by_device(12, 4), by_device(8, 4)
PLACES, PIXELS = FRAMES // DEEP * (SIDE // PATCH) ** 2, 3 * DEEP * PATCH**2
LEVELS = 1000


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


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(PIXELS, WIDTH)
        self.places, self.levels = nn.Embedding(PLACES, WIDTH), nn.Embedding(LEVELS, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, PIXELS)

    def forward(self, clips, level):
        x = self.stem(patches(clips)) + self.places.weight + self.levels(level).unsqueeze(1)
        return self.head(self.norm(self.layers(x)))


def patches(clips):
    b, side = clips.shape[0], SIDE // PATCH
    cut = clips.view(b, 3, FRAMES // DEEP, DEEP, side, PATCH, side, PATCH)
    return cut.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(b, PLACES, PIXELS)


def noise_from_host(clips):
    return torch.randn(clips.shape).to(clips.device)  # guilty


def noise_on_device(clips):
    return torch.randn_like(clips)


def build(noise_for):
    model = Denoiser().to(device())
    optimizer = adamw(model)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, LEVELS, device=device()), 0)
    data = in_turn(
        lambda: torch.randn(BATCH, 3, FRAMES, SIDE, SIDE, device=device()).clamp_(-1, 1), 4
    )

    def step():
        clips = next(data)
        noise = noise_for(clips)
        level = torch.randint(LEVELS, (BATCH,), device=device())
        share = kept[level].view(-1, 1, 1, 1, 1)
        with mixed():
            guess = model(share.sqrt() * clips + (1 - share).sqrt() * noise, level)
            loss = F.mse_loss(guess, patches(noise))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(noise_from_host)


def clean():
    return build(noise_on_device)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
