"""A recurrent network of its own kind, with a norm on the recurrent part, reads the load of a power grid.
It collects its states by joining each new one to the tensor of those before it. So every moment
copies all earlier states again, and the backward pass takes all these copies back: quadratic in
the length of the series. A list that is stacked at the end copies each state once.
A good finding names the tensor grown by torch.cat in the time loop and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the states of a time loop are collected by joining each to all the earlier ones",
    "FIX": "append the states to a list and stack them once after the loop",
}
BATCH, TIME, FEATURES = by_device(256, 32), by_device(512, 160), 12
WIDTH, HORIZON = by_device(1024, 64), 8


class NormedUnit(nn.Module):
    def __init__(self, grow):
        super().__init__()
        self.grow = grow
        self.inputs = nn.Linear(FEATURES, 2 * WIDTH)
        self.again = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.norm = nn.LayerNorm(2 * WIDTH)

    def forward(self, x):
        state = x.new_zeros(x.shape[0], WIDTH)
        states, joined = [], None
        for given in self.inputs(x).unbind(1):
            gate, new = (given + self.norm(self.again(state))).chunk(2, -1)
            state = torch.lerp(state, torch.tanh(new), torch.sigmoid(gate))
            if not self.grow:
                states.append(state)
            elif joined is None:
                joined = state[:, None]
            else:
                joined = torch.cat([joined, state[:, None]], 1)  # guilty
        return joined if self.grow else torch.stack(states, 1)


class Load(nn.Module):
    def __init__(self, grow):
        super().__init__()
        self.unit = NormedUnit(grow)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HORIZON))

    def forward(self, x):
        return self.head(self.unit(x))


def build(grow):
    model = Load(grow).to(device())
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, TIME, FEATURES, device=device()),
            torch.randn(BATCH, TIME, HORIZON, device=device()),
        )
    )

    def step():
        past, future = next(data)
        with mixed():
            loss = F.huber_loss(model(past).float(), future)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(grow=True)


def clean():
    return build(grow=False)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
