"""The states of a recurrent cell of one's own are collected by torch.cat with all earlier ones at
every time step: what was collected is copied again each time, and its gradient is cut apart
likewise.
A good finding names the copies by cat, whose size grows along the loop, and the line.
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
    "CPU_BATCH": 20,
    "CAUSE": "all earlier states are copied by torch.cat at every time step to append one more",
    "FIX": "append to a list and stack it once",
}
TIME, WIDTH, FEATURES = by_device(256, 112), by_device(512, 128), 16


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs, self.head = nn.Linear(FEATURES, 3 * WIDTH), nn.Linear(WIDTH, FEATURES)
        self.states, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.LayerNorm(WIDTH)

    def turn(self, x, state):
        skip, gate, new = x.chunk(3, -1)
        keep, mix = self.states(self.norm(state)).chunk(2, -1)
        gate = torch.sigmoid(gate + keep)
        return gate * state + (1 - gate) * torch.tanh(new + mix) + 0.1 * skip


class Grown(Recurrent):
    def forward(self, x):
        state = x.new_zeros(len(x), WIDTH)
        states = x.new_zeros(len(x), 0, WIDTH)
        for now in self.inputs(x).unbind(1):
            state = self.turn(now, state)
            states = torch.cat([states, state[:, None]], 1)  # guilty
        return self.head(states)


class Listed(Recurrent):
    def forward(self, x):
        state = x.new_zeros(len(x), WIDTH)
        states = []
        for now in self.inputs(x).unbind(1):
            state = self.turn(now, state)
            states.append(state)
        return self.head(torch.stack(states, 1))


def build(recurrent):
    my_turn()

    def batches(size):
        return in_turn(lambda: torch.randn(size, TIME + 1, FEATURES, device=device()))

    def loss(model, x):
        with mixed():
            return F.mse_loss(model(x[:, :-1]), x[:, 1:])

    return steplab.UserModel(recurrent(), batches, loss, TIME)


def faulty():
    return build(Grown)


def clean():
    return build(Listed)
