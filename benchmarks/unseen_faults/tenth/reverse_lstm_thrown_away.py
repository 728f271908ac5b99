"""A keyword spotter has a bidirectional LSTM, of whose output only the first half, that of the
forward direction, is used, so that it could run on a stream.
A good finding names the reverse direction, or the unused half of the output, and the line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 256,
    "CPU_BATCH": 32,
    "CAUSE": "the LSTM is bidirectional, but only the output of its forward direction is used",
    "FIX": "make the LSTM with bidirectional=False",
}
MELS, FRAMES, WORDS, WIDTH = 40, by_device(200, 64), 35, by_device(512, 128)


class Spotter(nn.Module):
    def __init__(self, both):
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS)
        self.front = nn.Linear(MELS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=both)


class Both(Spotter):
    def forward(self, mels):
        states, _ = self.lstm(F.relu(self.front(mels)))  # guilty
        return self.head(states[..., :WIDTH])


class Forward(Spotter):
    def forward(self, mels):
        states, _ = self.lstm(F.relu(self.front(mels)))
        return self.head(states)


def build(model):
    my_turn()
    chance = torch.Generator(device()).manual_seed(1)

    def batches(size):
        return in_turn(
            lambda: (
                torch.randn(size, FRAMES, MELS, device=device(), generator=chance),
                torch.randint(WORDS, (size, FRAMES), device=device(), generator=chance),
            )
        )

    def loss(model, batch):
        mels, words = batch
        with mixed():
            return F.cross_entropy(model(mels).flatten(0, 1), words.flatten())

    return steplab.UserModel(model, batches, loss, unit="recordings")


def faulty():
    return build(Both(True))


def clean():
    return build(Forward(False))
