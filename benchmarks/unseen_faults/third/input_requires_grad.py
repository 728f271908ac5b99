"""The images still require a gradient, left from a look at saliency maps, so the backward of the
first convolution also computes a gradient for every pixel, which nobody reads.
A good finding names the gradient of the input batch, and the line that asks for it.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the batch requires a gradient: the first convolution computes one for all pixels and keeps it in images.grad, unread",
    "FIX": "leave requires_grad_ out",
}
BATCH, SIDE, WIDTH = by_device(128, 4), by_device(224, 96), by_device(64, 32)


def network():
    return nn.Sequential(
        nn.Conv2d(3, WIDTH, 7, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Conv2d(WIDTH, 2 * WIDTH, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(2 * WIDTH, 2 * WIDTH, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * WIDTH, 10),
    )


def prepare():
    model = network().to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, 3, SIDE, SIDE, device=device()),
            torch.randint(10, (BATCH,), device=device()),
        )
    )
    return model, optimizer, data


def train_step(model, optimizer, images, labels):
    optimizer.zero_grad()
    with mixed():
        loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def faulty():
    model, optimizer, data = prepare()

    def step():
        images, labels = next(data)
        images = images.detach().requires_grad_()  # guilty
        return train_step(model, optimizer, images, labels)

    return step


def clean():
    model, optimizer, data = prepare()

    def step():
        images, labels = next(data)
        return train_step(model, optimizer, images, labels)

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
