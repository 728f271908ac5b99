"""Mixup weighs the losses of two targets for one mixed image. Each of the two losses calls the model
on the same mixed images, so forward and backward run twice.
A good finding names the model's second forward on the same input, and the line of the loss.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "mixup calls the model twice on the same mixed images, once per target",
    "FIX": "call the model once and compute both losses from its logits",
}
BATCH, SIDE, WIDTH, CLASSES = by_device(256, 32), by_device(64, 32), by_device(128, 32), 100


def prepare():
    model = nn.Sequential(
        nn.Conv2d(3, WIDTH, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(WIDTH, 2 * WIDTH, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(2 * WIDTH, 4 * WIDTH, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * WIDTH, CLASSES),
    ).to(device(), memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, 3, SIDE, SIDE, device=device()).contiguous(
                memory_format=torch.channels_last
            ),
            torch.randint(CLASSES, (BATCH,), device=device()),
        )
    )
    return model, optimizer, data


def update(loss, optimizer):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, optimizer, data = prepare()
    share = 0.7

    def step():
        x, y = next(data)
        x = torch.lerp(x.flip(0), x, share)
        with mixed():
            first = F.cross_entropy(model(x), y)
            second = F.cross_entropy(model(x), y.flip(0))  # guilty
        return update(share * first + (1 - share) * second, optimizer)

    return step


def clean():
    model, optimizer, data = prepare()
    share = 0.7

    def step():
        x, y = next(data)
        x = torch.lerp(x.flip(0), x, share)
        with mixed():
            logits = model(x)
            first = F.cross_entropy(logits, y)
            second = F.cross_entropy(logits, y.flip(0))
        return update(share * first + (1 - share) * second, optimizer)

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
