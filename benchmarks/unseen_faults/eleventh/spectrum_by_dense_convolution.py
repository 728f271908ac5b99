"""A small convolutional network removes noise from speech and is trained with a loss on magnitude
spectra. The spectra are convolutions with a bank of all sines and cosines, a dense product of 1024
samples with 1026 filters per frame, instead of a fast Fourier transform.
A good finding names the convolution with the Fourier bank in the spectral loss.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "spectra are computed by a dense convolution with sines and cosines instead of an FFT",
    "FIX": "use torch.stft",
}
BATCH, SAMPLES, CHANNELS = by_device(64, 8), by_device(32768, 8192), by_device(64, 24)
SIZE, HOP = 1024, 256


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Conv1d(1, CHANNELS, 16, stride=8, padding=4)
        self.layers = nn.ModuleList(
            nn.Conv1d(CHANNELS, CHANNELS, 3, padding=2**n, dilation=2**n) for n in range(4)
        )
        self.outside = nn.ConvTranspose1d(CHANNELS, 1, 16, stride=8, padding=4)

    def forward(self, x):
        h = self.inside(x)
        for layer in self.layers:
            h = h + F.gelu(layer(h))
        return x + self.outside(h)


def fourier_bank(window):
    angle = torch.arange(SIZE, dtype=torch.float64)
    angle = 2 * torch.pi / SIZE * (angle[: SIZE // 2 + 1, None] * angle % SIZE)
    bank = torch.cat([angle.cos(), -angle.sin()]).to(window.device) * window
    return bank.float().unsqueeze(1)


def build(magnitude):
    model = Denoiser().to(device())
    optimizer = adamw(model)

    def batch():
        speech = torch.randn(BATCH, 1, SAMPLES, device=device())
        return speech, speech + 0.3 * torch.randn_like(speech)

    data = in_turn(batch)

    def step():
        speech, noisy = next(data)
        with mixed():
            restored = model(noisy)
        with torch.no_grad():
            wanted = magnitude(speech)
        loss = F.l1_loss(magnitude(restored.float()), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    bank = fourier_bank(torch.hann_window(SIZE, device=device()))

    def magnitude(x):
        real, imaginary = F.conv1d(x, bank, stride=HOP).chunk(2, 1)  # guilty
        return torch.sqrt(real.square() + imaginary.square() + 1e-6)

    return build(magnitude)


def clean():
    window = torch.hann_window(SIZE, device=device())

    def magnitude(x):
        z = torch.stft(x.squeeze(1), SIZE, HOP, window=window, center=False, return_complex=True)
        z = torch.view_as_real(z)
        return torch.sqrt(z.square().sum(-1) + 1e-6)

    return build(magnitude)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
