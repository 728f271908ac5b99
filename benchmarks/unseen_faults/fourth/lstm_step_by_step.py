"""A recurrent network that reads whole sequences is called time step by time step in a Python loop,
with its state handed on, as one would in generation.
A good finding names the many calls of the LSTM with one time step each, and the line of the call.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 128,
    "CPU_BATCH": 10,
    "CAUSE": "nn.LSTM is called once per time step although the whole sequence is known",
    "FIX": "one call with the whole sequence",
}
TIME, WIDTH, VOCAB = by_device(256, 48), by_device(1024, 112), by_device(8192, 500)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)


class StepByStep(Reader):
    def forward(self, ids):
        x, state, outputs = self.tokens(ids), None, []
        for t in range(ids.shape[1]):
            y, state = self.lstm(x[:, t : t + 1], state)  # guilty
            outputs.append(y)
        return self.head(torch.cat(outputs, 1))


class WholeSequence(Reader):
    def forward(self, ids):
        return self.head(self.lstm(self.tokens(ids))[0])


def build(reader):
    my_turn()

    def batches(size):
        return in_turn(lambda: torch.randint(VOCAB, (size, TIME + 1), device=device()))

    def loss(model, ids):
        with mixed():
            return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return steplab.UserModel(reader(), batches, loss, TIME)


def faulty():
    return build(StepByStep)


def clean():
    return build(WholeSequence)
