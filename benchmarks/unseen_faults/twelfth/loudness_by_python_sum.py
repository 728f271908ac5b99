"""A convolutional network removes noise from speech. Speech and noise are mixed at a random ratio,
for which the power of every recording is summed up by Python, sample by sample.
A good finding names the Python sum over the samples, on the line that computes the power.
"""

import random

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the power of each recording is a Python sum over thousands of audio samples",
    "FIX": "take wave.square().mean()",
}
BATCH, LENGTH, WIDTH = by_device(64, 8), by_device(16000, 8000), by_device(128, 24)
COUNT = 64


def prepare():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(1, WIDTH, 16, stride=8, padding=4),
        nn.GELU(),
        nn.Conv1d(WIDTH, 2 * WIDTH, 5, padding=2),
        nn.GELU(),
        nn.Conv1d(2 * WIDTH, WIDTH, 5, padding=2),
        nn.GELU(),
        nn.ConvTranspose1d(WIDTH, 1, 16, stride=8, padding=4),
    ).to(device())
    speech, noise = 0.1 * torch.randn(COUNT, LENGTH), 0.3 * torch.randn(COUNT, LENGTH)
    return model, adamw(model), speech, noise, random.Random(0)


def mix(speech, noise, power, chance):
    """Return noisy and clean recordings."""
    noisy, wanted = [], []
    for _ in range(BATCH):
        s, n = speech[chance.randrange(COUNT)], noise[chance.randrange(COUNT)]
        ratio = 10 ** (chance.uniform(-5, 15) / 10)
        noisy.append(s + n * (float(power(s)) / (float(power(n)) * ratio)) ** 0.5)
        wanted.append(s)
    return torch.stack(noisy)[:, None], torch.stack(wanted)[:, None]


def learn(model, optimizer, noisy, wanted):
    noisy, wanted = noisy.to(device()), wanted.to(device())
    with mixed():
        heard = model(noisy)
    loss = F.l1_loss(heard.float(), wanted)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, optimizer, speech, noise, chance = prepare()

    def power(wave):
        return sum(v * v for v in wave.tolist()) / len(wave)  # guilty

    def step():
        return learn(model, optimizer, *mix(speech, noise, power, chance))

    return step


def clean():
    model, optimizer, speech, noise, chance = prepare()

    def power(wave):
        return wave.square().mean()

    def step():
        return learn(model, optimizer, *mix(speech, noise, power, chance))

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
