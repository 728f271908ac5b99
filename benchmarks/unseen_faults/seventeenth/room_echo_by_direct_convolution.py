"""A keyword spotter is trained on clips with a room's echo: each clip is convolved with the impulse
response of a random room, on the device. That is written as one grouped conv1d with thousands of taps,
which multiplies every sample by every tap; the same convolution through the FFT costs next to nothing.
A good finding names the convolution with the impulse responses and its line, and the FFT as the remedy.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import Block, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the echo is added by a direct convolution with thousands of taps",
    "FIX": "convolve with torch.fft.rfft and irfft",
}
BATCH, SAMPLES, TAPS = by_device(64, 8), by_device(48_000, 12_800), by_device(12_000, 5000)
WIDTH, HEADS, LAYERS = by_device(768, 96), by_device(12, 2), by_device(10, 3)
ROOMS, WORDS = by_device(400, 20), 35


class Spotter(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(1, WIDTH, 400, stride=160)
        self.blocks = nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, waves):
        x = F.gelu(self.stem(waves.unsqueeze(1))).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


def echo_direct(waves, rooms):
    padded = F.pad(waves, (TAPS - 1, 0)).unsqueeze(0)
    return F.conv1d(padded, rooms.flip(-1).unsqueeze(1), groups=waves.shape[0]).squeeze(0)  # guilty


def echo_by_fft(waves, rooms):
    length = SAMPLES + TAPS
    spectrum = torch.fft.rfft(waves, length) * torch.fft.rfft(rooms, length)
    return torch.fft.irfft(spectrum, length)[:, :SAMPLES]


def build(echo):
    model = Spotter().to(device())
    optimizer = adamw(model)
    fade = torch.exp(-torch.arange(TAPS, device=device()) * 6.0 / TAPS)
    rooms = torch.randn(ROOMS, TAPS, device=device()) * fade
    rooms = rooms / rooms.norm(dim=1, keepdim=True)

    def clips():
        waves = torch.randn(BATCH, SAMPLES, device=device())
        return waves, torch.randint(WORDS, (BATCH,), device=device())

    data = in_turn(clips)

    def step():
        waves, words = next(data)
        waves = echo(waves, rooms[torch.randint(ROOMS, (BATCH,), device=device())])
        with mixed():
            loss = F.cross_entropy(model(waves), words)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(echo_direct)


def clean():
    return build(echo_by_fft)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
