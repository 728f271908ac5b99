"""A vocoder turns mel frames into a waveform by upsampling 4 x 4 x 4 times. Each upsampling puts
three zeros between two samples and then runs an ordinary convolution, so that three quarters of
its products are with zeros, instead of a transposed convolution.
A good finding names the convolution over the samples with zeros in between.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "upsampling is a convolution over samples with zeros in between, mostly times zero",
    "FIX": "use ConvTranspose1d with the stride",
}
BATCH, FRAMES, MELS, CHANNELS = by_device(16, 6), by_device(64, 60), 80, by_device(256, 96)
RATE, KERNEL, PAD = 4, 8, 2


class Stuffed(nn.Module):
    """The same map as a transposed convolution."""

    def __init__(self, up):
        super().__init__()
        self.conv = nn.Conv1d(up.in_channels, up.out_channels, KERNEL, padding=KERNEL - 1 - PAD)
        with torch.no_grad():
            self.conv.weight.copy_(up.weight.flip(2).transpose(0, 1))
            self.conv.bias.copy_(up.bias)

    def forward(self, x):
        b, c, t = x.shape
        wide = x.new_zeros(b, c, (t - 1) * RATE + 1)
        wide[:, :, ::RATE] = x
        return self.conv(wide)  # guilty


class Vocoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(MELS, CHANNELS, 7, padding=3)
        sizes = [CHANNELS >> n for n in range(4)]
        self.ups = nn.ModuleList(
            nn.ConvTranspose1d(a, b, KERNEL, stride=RATE, padding=PAD)
            for a, b in zip(sizes[:-1], sizes[1:], strict=True)
        )
        self.rest = nn.ModuleList(nn.Conv1d(c, c, 3, padding=1) for c in sizes[1:])
        self.last = nn.Conv1d(sizes[-1], 1, 7, padding=3)

    def forward(self, mels):
        x = self.first(mels)
        for up, rest in zip(self.ups, self.rest, strict=True):
            x = F.leaky_relu(up(x), 0.1)
            x = x + F.leaky_relu(rest(x), 0.1)
        return self.last(x)


def build(model):
    model = model.to(device())
    optimizer = adamw(model)

    def batch():
        mels = torch.randn(BATCH, MELS, FRAMES, device=device())
        return mels, torch.randn(BATCH, 1, FRAMES * RATE**3, device=device())

    torch.manual_seed(1)
    data = in_turn(batch)

    def step():
        mels, wave = next(data)
        with mixed():
            made = model(mels)
        loss = F.l1_loss(made.float(), wave)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    model = Vocoder()
    model.ups = nn.ModuleList(Stuffed(up) for up in model.ups)
    return build(model)


def clean():
    return build(Vocoder())


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
