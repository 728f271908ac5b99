"""Every layer of an audio network is scaled and shifted by the speaker's vector, which is repeated
over all time steps first; the repeated scale of each layer is kept for the backward.
A good finding names the repeated tensors among what is saved or copied, and the line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "memory",
    "STYLE": "factory",
    "BATCH": 64,
    "CPU_BATCH": 8,
    "CAUSE": "scale and shift of each layer are repeated over time and saved instead of broadcast",
    "FIX": "multiply by the scale of shape (batch, channel, 1), which broadcasts",
}
TIME, WIDTH, LAYERS, SPEAKER = by_device(8000, 1500), by_device(256, 32), 6, 64


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.film = nn.Linear(SPEAKER, 2 * WIDTH)

    def modulation(self, speaker, time):
        return self.film(speaker)[..., None].chunk(2, 1)

    def forward(self, x, speaker):
        scale, shift = self.modulation(speaker, x.shape[-1])
        return x + F.relu(self.conv(x) * scale + shift)


class Repeated(Layer):
    def modulation(self, speaker, time):
        return self.film(speaker)[..., None].repeat(1, 1, time).chunk(2, 1)  # guilty


class Denoiser(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.first, self.last = nn.Conv1d(1, WIDTH, 1), nn.Conv1d(WIDTH, 1, 1)
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))

    def forward(self, wave, speaker):
        x = self.first(wave)
        for layer in self.layers:
            x = layer(x, speaker)
        return self.last(x)


def build(layer):
    my_turn()
    chance = torch.Generator(device()).manual_seed(1)

    def normal(*size):
        return torch.randn(*size, device=device(), generator=chance)

    def batches(size):
        return in_turn(
            lambda: (normal(size, 1, TIME), normal(size, SPEAKER), normal(size, 1, TIME)), 2
        )

    def loss(model, batch):
        noisy, speaker, wave = batch
        with mixed():
            return F.l1_loss(model(noisy, speaker), wave)

    return steplab.UserModel(Denoiser(layer), batches, loss, unit="recordings")


def faulty():
    return build(Repeated)


def clean():
    return build(Layer)
