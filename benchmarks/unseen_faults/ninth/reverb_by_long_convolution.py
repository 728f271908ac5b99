"""Speech is given the echo of a room by a convolution with an impulse response of thousands of
samples. F.conv1d does it directly, taps times samples, where an FFT takes far less.
A good finding names the direct convolution with the very long kernel (or the FFT), and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "an impulse response of thousands of taps is applied by a direct convolution",
    "FIX": "multiply the spectra: rfft, product, irfft",
}
BATCH, SAMPLES, TAPS = by_device(32, 6), by_device(65536, 12288), by_device(8192, 4096)
CHANNELS, LAYERS = by_device(128, 16), 3


def direct(dry, room):
    padded = F.pad(dry, (TAPS - 1, 0)).unsqueeze(0)
    return F.conv1d(padded, room.flip(-1).unsqueeze(1), groups=BATCH)[0]  # guilty


def spectral(dry, room):
    size = SAMPLES + TAPS
    wet = torch.fft.irfft(torch.fft.rfft(dry, size) * torch.fft.rfft(room, size), size)
    return wet[:, :SAMPLES]


def dereverb():
    layers = [nn.Conv1d(1, CHANNELS, 15, padding=7), nn.ReLU()]
    for i in range(LAYERS):
        layers += [nn.Conv1d(CHANNELS, CHANNELS, 5, padding=2 * 2**i, dilation=2**i), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv1d(CHANNELS, 1, 1))


def prepare(echo):
    model = dereverb().to(device())
    optimizer = adamw(model)
    decay = torch.exp(-torch.linspace(0, 7, TAPS, device=device()))
    data = in_turn(
        lambda: (
            torch.randn(BATCH, SAMPLES, device=device()),
            0.1 * torch.randn(BATCH, TAPS, device=device()) * decay,
        )
    )

    def step():
        dry, room = next(data)
        wet = echo(dry, room)
        with mixed():
            loss = F.l1_loss(model(wet.unsqueeze(1)).squeeze(1), dry)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def faulty():
    return prepare(direct)


def clean():
    return prepare(spectral)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
