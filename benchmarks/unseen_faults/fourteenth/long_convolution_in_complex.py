"""A model of raw sound has long convolutions with a learned kernel per channel, as in state-space
models, done by the FFT. Sound and kernel are real, but the layer takes the transform for complex
numbers and the real part of what comes back: twice the work and twice the memory of rfft and irfft.
A good finding names the complex FFT of real signals and one of the three lines.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the long convolution of real signals is done with fft and ifft, which are for complex ones",
    "FIX": "torch.fft.rfft and torch.fft.irfft",
}
BATCH, LENGTH, STRIDE = by_device(16, 4), by_device(4096, 512), 16
WIDTH, MODES, LAYERS = by_device(256, 48), 16, by_device(6, 2)


class StateSpace(nn.Module):
    """A diagonal state-space layer with real modes, applied as a convolution."""

    def __init__(self, real):
        super().__init__()
        self.real = real
        self.norm = nn.LayerNorm(WIDTH)
        self.rate = nn.Parameter(torch.rand(WIDTH, MODES) * 3 - 6)
        self.weight = nn.Parameter(torch.randn(WIDTH, MODES) / MODES)
        self.skip = nn.Parameter(torch.ones(WIDTH))
        self.mix = nn.Linear(WIDTH, 2 * WIDTH)
        self.register_buffer("moments", torch.arange(LENGTH).float(), persistent=False)

    def kernel(self):
        decay = torch.exp(-self.rate.exp()[..., None] * self.moments)
        return torch.einsum("wm,wmt->wt", self.weight, decay)

    def forward(self, x):
        u = self.norm(x).float().mT
        with torch.autocast(x.device.type, enabled=False):
            y = (convolve_real if self.real else convolve)(u, self.kernel())
            y = F.gelu(y + self.skip[:, None] * u)
        return x + F.glu(self.mix(y.mT))


def convolve(u, kernel):
    seen = torch.fft.fft(u, n=2 * LENGTH)  # guilty
    seen = seen * torch.fft.fft(kernel, n=2 * LENGTH)
    return torch.fft.ifft(seen).real[..., :LENGTH]


def convolve_real(u, kernel):
    seen = torch.fft.rfft(u, n=2 * LENGTH) * torch.fft.rfft(kernel, n=2 * LENGTH)
    return torch.fft.irfft(seen, n=2 * LENGTH)[..., :LENGTH]


class Sound(nn.Module):
    def __init__(self, real):
        super().__init__()
        self.frames = nn.Linear(STRIDE, WIDTH)
        self.layers = nn.Sequential(*(StateSpace(real) for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, STRIDE)

    def forward(self, frames):
        return self.head(self.layers(self.frames(frames)))


def build(real):
    model = Sound(real).to(device())
    optimizer = adamw(model)
    data = in_turn(lambda: torch.randn(BATCH, LENGTH + 1, STRIDE, device=device()))

    def step():
        frames = next(data)
        with mixed():
            predicted = model(frames[:, :-1])
        loss = F.mse_loss(predicted.float(), frames[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(real=False)


def clean():
    return build(real=True)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
