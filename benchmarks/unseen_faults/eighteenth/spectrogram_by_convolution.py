"""A network takes the noise out of speech and is trained on the waveform and on the magnitudes of its short
spectra. The spectra come from a module copied from an old text-to-speech project, which convolves the
wave with a kernel for the sine and the cosine of each frequency: that is a product with the full Fourier
matrix for every frame, forward and backward, where torch.stft takes the fast transform.
A good finding names the convolution with the large fixed kernels (or its share of the step) and its line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "spectra are taken by a convolution with the Fourier matrix instead of the fast transform",
    "FIX": "torch.stft(wave, FRAME, HOP, window=window, center=False, return_complex=True).abs()",
    "BATCH": 16,
    "CPU_BATCH": 4,
}
SAMPLES, FRAME, HOP = by_device(65_536, 8192), by_device(2048, 1024), by_device(256, 128)
WIDTH, LAYERS, STRIDE = by_device(128, 48), by_device(8, 4), 8


class ConvSpectrum(nn.Module):
    def __init__(self):
        super().__init__()
        time, pitch = torch.arange(FRAME), torch.arange(FRAME // 2 + 1)
        angle = 2 * torch.pi * (pitch[:, None] * time % FRAME).double() / FRAME
        kernels = torch.cat((angle.cos(), -angle.sin())) * torch.hann_window(FRAME).double()
        self.register_buffer("kernels", kernels.float()[:, None])

    def forward(self, wave):
        parts = F.conv1d(wave[:, None], self.kernels, stride=HOP)  # guilty
        real, imaginary = parts.chunk(2, dim=1)
        return (real.square() + imaginary.square() + 1e-8).sqrt()


class FastSpectrum(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(FRAME))

    def forward(self, wave):
        spectrum = torch.stft(wave, FRAME, HOP, window=self.window, center=False, return_complex=True)
        return (spectrum.real.square() + spectrum.imag.square() + 1e-8).sqrt()


class Denoiser(nn.Module):
    def __init__(self, spectrum):
        super().__init__()
        self.spectrum = spectrum
        self.inside = nn.Conv1d(1, WIDTH, 2 * STRIDE, stride=STRIDE, padding=STRIDE // 2)
        self.layers = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 5, padding=2) for _ in range(LAYERS))
        self.outside = nn.ConvTranspose1d(WIDTH, 1, 2 * STRIDE, stride=STRIDE, padding=STRIDE // 2)

    def forward(self, noisy):
        x = self.inside(noisy[:, None])
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return noisy + self.outside(x)[:, 0]


def pairs(size):
    def make():
        speech = torch.randn(size, SAMPLES, device=device())
        return speech + 0.3 * torch.randn_like(speech), speech

    return in_turn(make)


def loss(model, batch):
    noisy, speech = batch
    told = model(noisy)
    return F.l1_loss(told, speech) + F.l1_loss(model.spectrum(told), model.spectrum(speech))


def faulty():
    return steplab.UserModel(Denoiser(ConvSpectrum()), pairs, loss, optimizer=adamw)


def clean():
    return steplab.UserModel(Denoiser(FastSpectrum()), pairs, loss, optimizer=adamw)
