"""A recurrent network with normalized gates reads the sensors of a wind turbine. As nn.GRU has no
layer norm, the time is a Python loop. In each pass the cell projects the reading of that moment
and normalizes it, which does not depend on the state: for all moments together it is one matrix
product before the loop.
A good finding names the projection of the inputs inside the time loop and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the inputs are projected and normalized moment by moment inside the time loop",
    "FIX": "project and normalize the inputs of all moments at once before the loop",
}
BATCH, MOMENTS, SENSORS = by_device(256, 32), by_device(64, 32), by_device(512, 256)
WIDTH, AHEAD = by_device(512, 64), 8


class NormedGRU(nn.Module):
    def __init__(self, sensors, before_loop):
        super().__init__()
        self.before_loop = before_loop
        self.from_input = nn.Linear(sensors, 3 * WIDTH)
        self.from_state = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm_input, self.norm_state = nn.LayerNorm(3 * WIDTH), nn.LayerNorm(3 * WIDTH)

    def cell(self, given, state):
        reset1, update1, new1 = given.chunk(3, -1)
        reset2, update2, new2 = self.norm_state(self.from_state(state)).chunk(3, -1)
        new = torch.tanh(new1 + torch.sigmoid(reset1 + reset2) * new2)
        return torch.lerp(new, state, torch.sigmoid(update1 + update2))

    def forward(self, readings):
        state = readings.new_zeros(len(readings), WIDTH)
        states = []
        if self.before_loop:
            for given in self.norm_input(self.from_input(readings)).unbind(1):
                state = self.cell(given, state)
                states.append(state)
        else:
            for moment in range(readings.shape[1]):
                given = self.norm_input(self.from_input(readings[:, moment]))  # guilty
                state = self.cell(given, state)
                states.append(state)
        return torch.stack(states, 1)


class Turbine(nn.Module):
    def __init__(self, before_loop):
        super().__init__()
        self.gru = NormedGRU(SENSORS, before_loop)
        self.head = nn.Linear(WIDTH, AHEAD)

    def forward(self, readings):
        return self.head(self.gru(readings))


def build(before_loop):
    model = Turbine(before_loop).to(device())
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, MOMENTS, SENSORS, device=device()),
            torch.randn(BATCH, MOMENTS, AHEAD, device=device()),
        )
    )

    def step():
        readings, power = next(data)
        with mixed():
            predicted = model(readings)
        loss = F.mse_loss(predicted.float(), power)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(before_loop=False)


def clean():
    return build(before_loop=True)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
