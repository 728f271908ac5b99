"""A network that marks cells in pictures of tissue accumulates gradients over several micro-batches,
because a whole batch does not fit into memory. But the losses of the micro-batches are added up,
and `backward()` is called once at the end. So the activations of all micro-batches are alive at the
same time, and the accumulation saves nothing.
A good finding names the activations of several forward passes kept until one backward pass, and the
line where the losses are added.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "the losses of the micro-batches are added and backpropagated once, so the activations of all of them are alive together",
    "FIX": "call backward() for each micro-batch",
}
MICRO, PARTS = by_device(4, 1), 4
SIDE, WIDTH = by_device(512, 64), by_device(32, 16)


def conv(before, after, stride=1):
    return nn.Sequential(
        nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False),
        nn.GroupNorm(4, after),
        nn.ReLU(inplace=True),
    )


class Cells(nn.Module):
    """A small U-Net."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(conv(3, WIDTH), conv(WIDTH, WIDTH))
        self.deep = nn.Sequential(conv(WIDTH, 2 * WIDTH, 2), conv(2 * WIDTH, 2 * WIDTH))
        self.up = nn.ConvTranspose2d(2 * WIDTH, WIDTH, 2, 2)
        self.last = nn.Sequential(conv(2 * WIDTH, WIDTH), nn.Conv2d(WIDTH, 1, 1))

    def forward(self, x):
        x = self.first(x)
        return self.last(torch.cat([x, self.up(self.deep(x))], dim=1)).squeeze(1)


def build(at_once):
    model = Cells().to(device())
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.randn(MICRO, 3, SIDE, SIDE, device=device()),
            torch.randint(2, (MICRO, SIDE, SIDE), device=device()).float(),
        )
    )

    def loss_of_a_part():
        picture, mask = next(data)
        with mixed():
            return F.binary_cross_entropy_with_logits(model(picture), mask) / PARTS

    def step():
        total = torch.zeros((), device=device())
        for _ in range(PARTS):
            loss = loss_of_a_part()
            if at_once:
                total = total + loss  # guilty
            else:
                loss.backward()
                total += loss.detach()
        if at_once:
            total.backward()
        optimizer.step()
        optimizer.zero_grad()
        return total.detach()

    return step


def faulty():
    return build(at_once=True)


def clean():
    return build(at_once=False)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
