"""Long convolution: steplab profile examples/faults/long_convolution.py:faulty

Clips of sound are given the echo of a room: each is convolved with an impulse response of thousands
of samples, as a sum for every sample of the result. The clean twin multiplies spectra.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import steplab

rule = "long_convolution"
where = "cpu"


class Listener(nn.Module):
    """Classes of sounds, by frames of 256 samples."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(256, width), nn.GELU(), nn.Linear(width, width))
        self.head = nn.Linear(width, 16)

    def forward(self, sound_BT: Tensor) -> Tensor:
        """Return the logits of each sound."""
        return self.head(F.gelu(self.body(sound_BT.unflatten(1, (-1, 256)))).mean(1))


def by_sums(sound_BT: Tensor, room_BK: Tensor) -> Tensor:
    """Sum over the taps for every sample; the taps are turned around, as torch correlates."""
    taps = room_BK.shape[1]
    found = F.conv1d(
        sound_BT[None], room_BK.flip(1)[:, None], padding=taps - 1, groups=len(room_BK)
    )
    return found[0, :, : sound_BT.shape[1]]


def by_transforms(sound_BT: Tensor, room_BK: Tensor) -> Tensor:
    """Multiply the spectra."""
    length = sound_BT.shape[1]
    n = length + room_BK.shape[1]
    return torch.fft.irfft(torch.fft.rfft(sound_BT, n) * torch.fft.rfft(room_BK, n), n)[:, :length]


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(samples: int, taps: int, width: int, transformed: bool) -> steplab.UserModel:
    """Classify sounds in rooms."""

    def batches(size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        while True:
            room_BK = torch.randn(size, taps) * torch.linspace(0, -6, taps).exp()
            yield torch.randn(size, samples), room_BK, torch.randint(16, (size,))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        sound_BT, room_BK, label_B = batch
        heard_BT = (by_transforms if transformed else by_sums)(sound_BT, room_BK)
        return F.cross_entropy(model(heard_BT), label_B)

    return steplab.UserModel(Listener(width), batches, loss, samples, optimizer=adamw)


def faulty(samples: int = 8192, taps: int = 2048, width: int = 768) -> steplab.UserModel:
    """A sum over all taps for every sample."""
    return made(samples, taps, width, transformed=False)


def clean(samples: int = 8192, taps: int = 2048, width: int = 768) -> steplab.UserModel:
    """Spectra."""
    return made(samples, taps, width, transformed=True)
