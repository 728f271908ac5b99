"""A diffusion model of small latents is conditioned on prompts, which a frozen text encoder reads. Denoiser
and encoder are parts of one pipeline module, and the moving average that samples are drawn with later is
kept of the whole pipeline: in every step each weight of the encoder is averaged with itself, although it
never changes, and the encoder, with its vocabulary, is larger than the denoiser.
A good finding names the averaging of weights that are frozen and the line that updates the average.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from common import Block, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the moving average of the weights takes in the frozen text encoder, which never changes",
    "FIX": "average only what is trained, and share the frozen encoder between the two pipelines",
}
BATCH, WORDS, VOCAB = by_device(16, 2), 16, by_device(262_144, 98_304)
SIDE, CHANNELS = by_device(32, 8), 4
WIDTH, HEADS, LAYERS = by_device(1024, 128), by_device(16, 2), by_device(8, 4)
DECAY = 0.999


class TextEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(2)))

    def forward(self, prompt):
        return self.blocks(self.words(prompt) + self.places.weight)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.outside = nn.Linear(CHANNELS, WIDTH), nn.Linear(WIDTH, CHANNELS)
        self.places = nn.Parameter(0.02 * torch.randn(SIDE * SIDE, WIDTH))
        self.time = nn.Sequential(nn.Linear(1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(LAYERS)))

    def forward(self, latent, level, text):
        x = self.inside(latent) + self.places + self.time(level)[:, None]
        return self.outside(self.blocks(torch.cat((text, x), dim=1))[:, WORDS:])


class Pipeline(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.denoiser = TextEncoder().requires_grad_(False), Denoiser()

    def forward(self, latent, level, prompt):
        with torch.no_grad():
            text = self.encoder(prompt)
        return self.denoiser(latent, level, text)


@torch.no_grad()
def average_pipeline(average, pipeline):
    for kept, weight in zip(average.parameters(), pipeline.parameters(), strict=True):
        kept.lerp_(weight, 1 - DECAY)  # guilty


@torch.no_grad()
def average_denoiser(average, pipeline):
    for kept, weight in zip(average.denoiser.parameters(), pipeline.denoiser.parameters(), strict=True):
        kept.lerp_(weight, 1 - DECAY)


def make(update):
    torch.manual_seed(0)
    pipeline = Pipeline().to(device())
    average = copy.deepcopy(pipeline).requires_grad_(False)
    optimizer = torch.optim.AdamW(pipeline.denoiser.parameters(), lr=1e-4, fused=True)

    def batch():
        latent = torch.randn(BATCH, SIDE * SIDE, CHANNELS, device=device())
        return latent, torch.randint(VOCAB, (BATCH, WORDS), device=device())

    batches = in_turn(batch)

    def step():
        latent, prompt = next(batches)
        level, noise = torch.rand(BATCH, 1, device=device()), torch.randn_like(latent)
        noisy = torch.lerp(latent, noise, level[:, None])
        with mixed():
            loss = F.mse_loss(pipeline(noisy, level, prompt), noise - latent)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update(average, pipeline)
        return loss.detach()

    return step


def faulty():
    return make(average_pipeline)


def clean():
    return make(average_denoiser)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
