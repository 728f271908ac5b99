"""The images of a diffusion model are noised to all times at once, and the one time that each image
was given is picked afterward.
A good finding names the tensor of all noised images (times x batch), of which one in a hundred is
used, and its line.
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
    "CPU_BATCH": 10,
    "CAUSE": "every image is noised to all times at once, and one of them is used",
    "FIX": "index the schedule with the times first",
}
SIDE, CHANNELS, TIMES = by_device(64, 32), by_device(128, 24), by_device(400, 100)


class Denoiser(nn.Module):
    def __init__(self, noised):
        super().__init__()
        kept = torch.linspace(0.999, 0.9, TIMES).cumprod(0)
        self.register_buffer("signal", kept.sqrt())
        self.register_buffer("spread", (1 - kept).sqrt())
        self.noised, self.times = noised, nn.Embedding(TIMES, CHANNELS)
        self.first, self.last = nn.Conv2d(3, CHANNELS, 3, 1, 1), nn.Conv2d(CHANNELS, 3, 3, 1, 1)
        self.middle = nn.Sequential(
            nn.Conv2d(CHANNELS, CHANNELS, 3, 1, 1),
            nn.SiLU(),
            nn.Conv2d(CHANNELS, CHANNELS, 3, 1, 1),
            nn.SiLU(),
        )

    def forward(self, images, noise, times):
        x = self.first(self.noised(self, images, noise, times))
        return self.last(self.middle(x + self.times(times)[:, :, None, None]))


def all_times(model, images, noise, times):
    signal, spread = (s.view(-1, 1, 1, 1, 1) for s in (model.signal, model.spread))
    path = signal * images + spread * noise  # guilty
    return path[times, torch.arange(len(images), device=images.device)]


def given_times(model, images, noise, times):
    signal, spread = (s[times].view(-1, 1, 1, 1) for s in (model.signal, model.spread))
    return signal * images + spread * noise


def build(noised):
    my_turn()

    def batch(size):
        return (
            torch.rand(size, 3, SIDE, SIDE, device=device()),
            torch.randn(size, 3, SIDE, SIDE, device=device()),
            torch.randint(TIMES, (size,), device=device()),
        )

    def loss(model, batch):
        with mixed():
            return F.mse_loss(model(*batch), batch[1])

    return steplab.UserModel(
        Denoiser(noised), lambda size: in_turn(lambda: batch(size)), loss, unit="images"
    )


def faulty():
    return build(all_times)


def clean():
    return build(given_times)
