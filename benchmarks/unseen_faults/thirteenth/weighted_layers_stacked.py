"""A classifier of emotions reads a learned average over the states of all layers of a frozen speech
encoder. The states, which a list already holds, are stacked to one tensor and multiplied by the
weights of the layers before the sum: three times the memory of all layers at once. A running
sum keeps the states alone.
A good finding names the stacked states of all layers (or their product) and the line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import Block, by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "memory",
    "STYLE": "factory",
    "BATCH": 32,
    "CPU_BATCH": 8,
    "CAUSE": "the states of all layers are stacked and multiplied before their weighted sum, so they are in memory three times",
    "FIX": "add each layer's state times its weight to a running sum",
}
TIME, MELS, CLASSES = by_device(800, 200), 80, 8
WIDTH, LAYERS = by_device(512, 64), by_device(24, 16)


class Encoder(nn.Module):
    """A frozen encoder that returns the states of all layers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(MELS, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, WIDTH // 64) for _ in range(LAYERS))
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, x):
        states = [self.embed(x)]
        for block in self.blocks:
            states.append(block(states[-1]))
        return states


def stacked(states, weights):
    return (torch.stack(states) * weights[:, None, None, None]).sum(0)  # guilty


def running(states, weights):
    total = states[0] * weights[0]
    for state, weight in zip(states[1:], weights[1:], strict=True):
        total = total + state * weight
    return total


class Classifier(nn.Module):
    def __init__(self, average):
        super().__init__()
        self.encoder, self.average = Encoder(), average
        if device() == "cuda":
            self.encoder.bfloat16()
        self.weights = nn.Parameter(torch.zeros(LAYERS + 1))
        self.hidden, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, mels):
        states = self.encoder(mels)
        x = self.average(states, self.weights.softmax(0).to(states[0].dtype))
        return self.head(F.relu(self.hidden(x)).mean(1))


def build(average):
    my_turn()

    def batch(size):
        mels = torch.randn(size, TIME, MELS, device=device())
        return mels, torch.randint(CLASSES, (size,), device=device())

    def loss(model, pair):
        with mixed():
            return F.cross_entropy(model(pair[0]), pair[1])

    return steplab.UserModel(
        Classifier(average), lambda size: in_turn(lambda: batch(size), 4), loss, unit="recordings"
    )


def faulty():
    return build(stacked)


def clean():
    return build(running)
