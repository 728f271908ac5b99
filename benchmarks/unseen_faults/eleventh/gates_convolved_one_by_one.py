"""A ConvLSTM predicts the next radar image from the last six. The cell has one convolution for each
of its four gates, all of the same input, instead of one convolution with four times the channels.
A good finding names the four convolutions of the same input in the cell.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the four gates of the cell are four small convolutions of the same input",
    "FIX": "use one convolution with four times the output channels and chunk its result",
}
BATCH, TIME, SIDE, HIDDEN = by_device(32, 5), by_device(10, 6), by_device(64, 20), by_device(32, 12)


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.gates = nn.ModuleList(nn.Conv2d(1 + HIDDEN, HIDDEN, 5, padding=2) for _ in range(4))

    def activations(self, both):
        return [gate(both) for gate in self.gates]  # guilty

    def forward(self, x, h, c):
        i, f, o, g = self.activations(torch.cat([x, h], 1))
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


class OneConvolution(Cell):
    def __init__(self):
        super().__init__()
        gates = self.gates
        self.gates = nn.Conv2d(1 + HIDDEN, 4 * HIDDEN, 5, padding=2)
        with torch.no_grad():
            self.gates.weight.copy_(torch.cat([gate.weight for gate in gates]))
            self.gates.bias.copy_(torch.cat([gate.bias for gate in gates]))

    def activations(self, both):
        return self.gates(both).chunk(4, 1)


class Radar(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.head = nn.Conv2d(HIDDEN, 1, 3, padding=1)
        self.cell = cell()

    def forward(self, images):
        h = c = images.new_zeros(len(images), HIDDEN, SIDE, SIDE)
        for x in images.unbind(1):
            h, c = self.cell(x, h, c)
        return self.head(h)


def build(cell):
    model = Radar(cell).to(device())
    optimizer = adamw(model)
    torch.manual_seed(1)
    data = in_turn(lambda: torch.rand(BATCH, TIME + 1, 1, SIDE, SIDE, device=device()))

    def step():
        images = next(data)
        with mixed():
            made = model(images[:, :-1])
        loss = F.mse_loss(made.float(), images[:, -1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(Cell)


def clean():
    return build(OneConvolution)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
