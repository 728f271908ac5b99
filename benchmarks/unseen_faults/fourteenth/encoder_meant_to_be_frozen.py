"""A small head learns to recognize speakers on top of a pretrained encoder of sound, which is not
trained: the optimizer got the parameters of the head alone. But nobody told autograd. The encoder
runs with gradients, the backward pass goes all the way down to the waveform's first convolution, and
the gradients pile up in weights that are never updated.
A good finding names the backward pass through the encoder (gradients of weights that no optimizer
has), and the line of the encoder's call.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the encoder is not in the optimizer but still requires gradients, so the backward pass runs through all of it",
    "FIX": "run the encoder under torch.no_grad(), or requires_grad_(False)",
}
BATCH, SAMPLES = by_device(64, 4), by_device(64_000, 6000)
WIDTH, SPEAKERS = by_device(384, 48), by_device(1000, 100)


def conv(before, after, size, stride):
    return nn.Sequential(
        nn.Conv1d(before, after, size, stride, bias=False), nn.GroupNorm(8, after), nn.GELU()
    )


def pretrained():
    """Stand for an encoder that is loaded from a file."""
    return nn.Sequential(
        conv(1, WIDTH, 10, 5),
        conv(WIDTH, WIDTH, 3, 2),
        conv(WIDTH, WIDTH, 3, 2),
        conv(WIDTH, WIDTH, 3, 2),
        conv(WIDTH, WIDTH, 3, 2),
    )


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.speakers = nn.Linear(WIDTH, SPEAKERS)

    def forward(self, heard):
        return self.speakers(self.recurrent(heard.transpose(1, 2))[0].mean(1))


def build(frozen):
    encoder, head = pretrained().to(device()).eval(), Head().to(device())
    optimizer = adamw(head)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, 1, SAMPLES, device=device()),
            torch.randint(SPEAKERS, (BATCH,), device=device()),
        )
    )

    def step():
        sound, speaker = next(data)
        with mixed():
            if frozen:
                with torch.no_grad():
                    heard = encoder(sound)
            else:
                heard = encoder(sound)  # guilty
            loss = F.cross_entropy(head(heard), speaker)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(frozen=False)


def clean():
    return build(frozen=True)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
