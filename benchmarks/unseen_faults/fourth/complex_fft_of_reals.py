"""A long convolution goes through the Fourier transform of complex numbers, although signal and
filter are real: half of what it computes is the mirror image of the other half.
A good finding names the complex transforms and products of real data, and the line of one of them.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 16,
    "CPU_BATCH": 2,
    "CAUSE": "fft and ifft of real signals, twice the work and memory of rfft and irfft",
    "FIX": "torch.fft.rfft and irfft",
}
TIME, WIDTH, LAYERS = by_device(8192, 4096), by_device(512, 16), by_device(6, 4)


def complex_convolution(x, kernel):
    spectrum = torch.fft.fft(x, n=2 * TIME) * torch.fft.fft(kernel, n=2 * TIME)  # guilty
    return torch.fft.ifft(spectrum).real[..., :TIME]


def real_convolution(x, kernel):
    spectrum = torch.fft.rfft(x, n=2 * TIME) * torch.fft.rfft(kernel, n=2 * TIME)
    return torch.fft.irfft(spectrum, n=2 * TIME)[..., :TIME]


class Layer(nn.Module):
    def __init__(self, convolution):
        super().__init__()
        self.convolution = convolution
        self.kernel = nn.Parameter(torch.randn(WIDTH, TIME) / TIME)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x):
        return x + self.mix(F.gelu(self.convolution(x.float(), self.kernel)))


class Net(nn.Module):
    def __init__(self, convolution):
        super().__init__()
        self.embed, self.head = nn.Conv1d(8, WIDTH, 1), nn.Conv1d(WIDTH, 8, 1)
        self.layers = nn.Sequential(*(Layer(convolution) for _ in range(LAYERS)))

    def forward(self, x):
        return self.head(self.layers(self.embed(x)))


def build(convolution):
    my_turn()

    def batches(size):
        return in_turn(lambda: torch.randn(size, 8, TIME, device=device()))

    def loss(model, x):
        with mixed():
            return F.mse_loss(model(x), x.cumsum(-1) / TIME**0.5)

    return steplab.UserModel(Net(convolution), batches, loss, TIME)


def faulty():
    return build(complex_convolution)


def clean():
    return build(real_convolution)
