"""Text-to-image diffusion on latents, with the prompts' text states prepared beforehand. A tenth of
the prompts becomes the empty one, whose states the frozen text encoder computes in every step.
A good finding names the frozen text encoder that encodes the same empty prompt, and its line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the frozen text encoder encodes the same empty prompts in every step",
    "FIX": "encode one empty prompt before the training and expand it",
}
BATCH, SIDE, CHANNELS, WIDTH = by_device(64, 8), by_device(32, 11), 4, by_device(512, 96)
TOKENS, TEXT, LAYERS, VOCAB = by_device(77, 24), by_device(768, 192), by_device(12, 3), 1000


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(CHANNELS, WIDTH)
        self.time, self.text = nn.Linear(1, WIDTH), nn.Linear(TEXT, WIDTH)
        self.looks = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, WIDTH // 32, batch_first=True) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.feeds = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(2)
        )
        self.outside = nn.Linear(WIDTH, CHANNELS)

    def forward(self, x, t, text):
        x = self.inside(x) + self.time(t)[:, None]
        text = self.text(text)
        for look, norm, feed in zip(self.looks, self.norms, self.feeds, strict=True):
            x = x + look(norm(x), text, text, need_weights=False)[0]
            x = x + feed(x)
        return self.outside(x)


def prepare():
    model = Denoiser().to(device())
    encoder = Decoder(TEXT, LAYERS, VOCAB, TOKENS).to(device()).requires_grad_(False).eval()
    data = in_turn(
        lambda: (
            torch.randn(BATCH, SIDE * SIDE, CHANNELS, device=device()),
            torch.randn(BATCH, TOKENS, TEXT, device=device()),
        )
    )
    return model, encoder, adamw(model), data


def learn(model, optimizer, latents, text, empty):
    dropped = torch.rand(BATCH, 1, 1, device=device()) < 0.1
    text = torch.where(dropped, empty, text)
    t, noise = torch.rand(BATCH, 1, device=device()), torch.randn_like(latents)
    noisy = latents + t[:, None] * (noise - latents)
    with mixed():
        guess = model(noisy, t, text)
    loss = F.mse_loss(guess.float(), noise - latents)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, encoder, optimizer, data = prepare()
    no_prompt = torch.zeros(BATCH, TOKENS, dtype=torch.long, device=device())

    def step():
        latents, text = next(data)
        with torch.no_grad(), mixed():
            empty = encoder.hidden(no_prompt)  # guilty
        return learn(model, optimizer, latents, text, empty)

    return step


def clean():
    model, encoder, optimizer, data = prepare()
    no_prompt = torch.zeros(1, TOKENS, dtype=torch.long, device=device())
    with torch.no_grad(), mixed():
        empty = encoder.hidden(no_prompt)
    del encoder

    def step():
        latents, text = next(data)
        return learn(model, optimizer, latents, text, empty)

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
