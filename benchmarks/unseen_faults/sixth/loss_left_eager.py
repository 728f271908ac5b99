"""The model is compiled, but its loss, the likelihood of a mixture of logistics, is not: a dozen
elementwise operators, forward and backward, over tensors much larger than the model's activations.
A good finding names the chain of eager elementwise operators of the loss, and a line of it.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 64,
    "CPU_BATCH": 8,
    "CAUSE": "only the model is compiled; the loss runs as a dozen eager operators over its largest tensors",
    "FIX": "compile the loss too",
}
SIDE, WIDTH, PARTS = by_device(64, 48), by_device(128, 8), 20


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, WIDTH, 3, padding=1)
        self.middle = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.last = nn.Conv2d(WIDTH, 3 * PARTS, 1)

    def forward(self, x):
        x = F.silu(self.first(x))
        return self.last(x + F.silu(self.middle(x)))


def likelihood(found, x):
    weight, mean, scale = found.float().chunk(3, dim=1)
    narrow = torch.exp(-scale.clamp(min=-7.0))
    centered = x - mean
    above = torch.sigmoid(narrow * (centered + 1 / 255))  # guilty
    below = torch.sigmoid(narrow * (centered - 1 / 255))
    log = torch.log((above - below).clamp(min=1e-12))
    return -torch.logsumexp(log + F.log_softmax(weight, dim=1), dim=1).mean()


def build(score):
    my_turn()
    model = Model().to(memory_format=torch.channels_last)
    model.compile()

    def batches(size):
        return in_turn(
            lambda: torch.rand(size, 1, SIDE, SIDE, device=device()).contiguous(
                memory_format=torch.channels_last
            )
        )

    def loss(model, x):
        with mixed():
            found = model(x)
        return score(found, x)

    return steplab.UserModel(model, batches, loss, unit="images")


def faulty():
    return build(likelihood)


def clean():
    return build(torch.compile(likelihood))
