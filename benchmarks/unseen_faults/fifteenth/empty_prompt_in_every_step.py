"""A text-to-image diffusion model is fine-tuned with classifier-free guidance: one caption in ten is
replaced by the empty prompt. As in a well-known script, the empty prompt goes through the frozen
text encoder in every step, once for each row of the batch. Its embedding never changes.
A good finding names the encoder's pass over empty prompts, the same in each step, and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import Block, adamw, by_device, device, in_turn, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "the frozen text encoder encodes the empty prompt anew in every step",
    "FIX": "encode the empty prompt once, as one row, and keep its embedding as a buffer",
    "BATCH": 32,
    "CPU_BATCH": 10,
}
VOCAB, TOKENS, TEXT = by_device(49_408, 1000), by_device(77, 32), by_device(768, 128)
SIDE, CHANNELS, WIDTH = by_device(64, 12), 4, by_device(320, 48)
TEXT_LAYERS, LAYERS, TIMES = by_device(12, 4), by_device(4, 3), 1000


class TextEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, TEXT), nn.Embedding(TOKENS, TEXT)
        self.blocks = nn.ModuleList(Block(TEXT, TEXT // 32) for _ in range(TEXT_LAYERS))
        self.norm = nn.LayerNorm(TEXT)

    def forward(self, ids):
        x = self.tokens(ids) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class ImageBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, WIDTH), nn.GroupNorm(8, WIDTH)
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(TEXT, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, moment, text):
        x = x + self.conv(F.silu(self.norm1(x) + moment[:, :, None, None]))

        def heads(y):
            return y.unflatten(-1, (-1, 16)).transpose(1, 2)

        k, v = self.kv(text).chunk(2, -1)
        q = self.q(self.norm2(x).flatten(2).transpose(1, 2))
        y = F.scaled_dot_product_attention(heads(q), heads(k), heads(v))
        return x + self.out(y.transpose(1, 2).flatten(2)).transpose(1, 2).view_as(x)


class Painter(nn.Module):
    def __init__(self, kept):
        super().__init__()
        self.text_encoder = TextEncoder().requires_grad_(False).eval()
        self.moments = nn.Embedding(TIMES, WIDTH)
        self.start = nn.Conv2d(CHANNELS, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(ImageBlock() for _ in range(LAYERS))
        self.end = nn.Conv2d(WIDTH, CHANNELS, 3, padding=1)
        self.register_buffer("empty_ids", torch.zeros(1, TOKENS, dtype=torch.long))
        with torch.no_grad():
            self.register_buffer("empty", self.text_encoder(self.empty_ids) if kept else None)

    def condition(self, captions, dropped):
        with torch.no_grad():
            text = self.text_encoder(captions)
            empty = self.empty
            if empty is None:
                empty = self.text_encoder(self.empty_ids.expand_as(captions))  # guilty
            return torch.where(dropped[:, None, None], empty.to(text.dtype), text)

    def forward(self, noisy, times, captions, dropped):
        text = self.condition(captions, dropped)
        x, moment = self.start(noisy), self.moments(times)
        for block in self.blocks:
            x = block(x, moment, text)
        return self.end(F.silu(x))


def loss_of(model, batch):
    latents, noise, level, times, captions, dropped = batch
    noisy = level.sqrt() * latents + (1 - level).sqrt() * noise
    with mixed():
        return F.mse_loss(model(noisy, times, captions, dropped).float(), noise)


def batches(size):
    levels = torch.cumprod(1 - torch.linspace(1e-4, 0.02, TIMES, device=device()), 0)

    def make():
        latents = torch.randn(size, CHANNELS, SIDE, SIDE, device=device())
        times = torch.randint(TIMES, (size,), device=device())
        captions = torch.randint(1, VOCAB, (size, TOKENS), device=device())
        dropped = torch.rand(size, device=device()) < 0.1
        level = levels[times][:, None, None, None]
        return latents, torch.randn_like(latents), level, times, captions, dropped

    return in_turn(make)


def build(kept):
    import steplab

    return steplab.UserModel(Painter(kept), batches, loss_of, optimizer=adamw)


def faulty():
    return build(kept=False)


def clean():
    return build(kept=True)
