"""An LSTM's states are all there, but the head and the loss run in a loop over the time steps. Each
turn is a small product of its own, and its backward pass fills a gradient of all states.
A good finding names the many small operators of the loop or the fills of its slices, and the line.
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
    "CPU_BATCH": 16,
    "CAUSE": "head and loss run once per time step, in a loop, on slices of the states",
    "FIX": "one product and one loss for all time steps",
}
TIME, WIDTH, VOCAB = by_device(256, 96), by_device(1024, 128), by_device(4096, 200)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, ids):
        return self.lstm(self.embed(ids))[0]


def faulty_loss(model, ids):
    with mixed():
        states, loss = model(ids[:, :-1]), 0.0
        for t in range(TIME):
            loss = loss + F.cross_entropy(model.head(states[:, t]), ids[:, t + 1])  # guilty
        return loss / TIME


def clean_loss(model, ids):
    with mixed():
        logits = model.head(model(ids[:, :-1]))
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def build(loss):
    my_turn()

    def batches(size):
        return in_turn(lambda: torch.randint(VOCAB, (size, TIME + 1), device=device()))

    return steplab.UserModel(Net(), batches, loss, TIME)


def faulty():
    return build(faulty_loss)


def clean():
    return build(clean_loss)
