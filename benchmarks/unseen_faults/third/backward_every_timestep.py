"""The loss of every time step of a recurrent model is backpropagated by itself with
retain_graph=True, so the first cell is gone through as often as there are time steps.
A good finding names the backward passes through the same graph (their work grows with the square
of the length), and the line of that backward.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "backward(retain_graph=True) at every time step goes through all earlier cells again",
    "FIX": "add up the losses and call backward once",
}
BATCH, TIME, WIDTH, FEATURES = by_device(256, 24), by_device(32, 20), by_device(1024, 256), 16


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(FEATURES, WIDTH), nn.Linear(WIDTH, FEATURES)

    def start(self):
        zero = torch.zeros(BATCH, WIDTH, device=device())
        return zero, zero


def prepare():
    model = Forecaster().to(device())
    data = in_turn(lambda: torch.randn(BATCH, TIME + 1, FEATURES, device=device()))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), data


def faulty():
    model, optimizer, data = prepare()

    def step():
        x, state, total = next(data), model.start(), 0.0
        optimizer.zero_grad()
        with mixed():
            for t in range(TIME):
                state = model.cell(x[:, t], state)
                loss = F.mse_loss(model.head(state[0]), x[:, t + 1])
                loss.backward(retain_graph=True)  # guilty
                total += loss.detach()
        optimizer.step()
        return total

    return step


def clean():
    model, optimizer, data = prepare()

    def step():
        x, state, total = next(data), model.start(), 0.0
        optimizer.zero_grad()
        with mixed():
            for t in range(TIME):
                state = model.cell(x[:, t], state)
                total = total + F.mse_loss(model.head(state[0]), x[:, t + 1])
        total.backward()
        optimizer.step()
        return total.detach()

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
