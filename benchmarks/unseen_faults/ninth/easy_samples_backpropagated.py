"""Online hard example mining: the loss is the mean of the largest losses of the batch. They are
picked from the losses of one forward pass with a graph, so the backward pass runs over all images,
although the gradient of seven in eight is zero.
A good finding names the backward pass of samples whose gradient is zero, or the line of the topk.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the backward pass runs over the whole batch although only the hardest eighth of the losses is used",
    "FIX": "find the hard samples without a graph, then run forward and backward on these alone",
}
BATCH, HARD, SIZE = by_device(1024, 64), by_device(128, 8), by_device(64, 32)
WIDTH, CLASSES = by_device(128, 64), 100


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, width), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return x + self.conv(F.relu(self.norm(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.blocks = nn.Sequential(Block(WIDTH), Block(WIDTH))
        self.down = nn.Conv2d(WIDTH, 2 * WIDTH, 2, stride=2)
        self.more = nn.Sequential(Block(2 * WIDTH), Block(2 * WIDTH))
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, x):
        x = self.more(self.down(self.blocks(self.stem(x))))
        return self.head(x.mean((2, 3)))


def prepare():
    model = Net().to(device())
    data = in_turn(
        lambda: (
            torch.randn(BATCH, 3, SIZE, SIZE, device=device()),
            torch.randint(CLASSES, (BATCH,), device=device()),
        )
    )
    return model, adamw(model), data


def update(loss, optimizer):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, optimizer, data = prepare()

    def step():
        x, y = next(data)
        with mixed():
            losses = F.cross_entropy(model(x), y, reduction="none")
            loss = losses.topk(HARD).values.mean()  # guilty
        return update(loss, optimizer)

    return step


def clean():
    model, optimizer, data = prepare()

    def step():
        x, y = next(data)
        with mixed():
            with torch.no_grad():
                losses = F.cross_entropy(model(x), y, reduction="none")
                hard = losses.topk(HARD).indices
            loss = F.cross_entropy(model(x[hard]), y[hard])
        return update(loss, optimizer)

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
