"""An image classifier with a moving average of its weights. To have statistics
for its batch norms, the averaged model runs on every batch, although it is used once per epoch.
A good finding names the forward of the averaged model in every step, and its line.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the averaged model runs on every batch to refresh its batch norms, unused till later",
    "FIX": "refresh the batch norms of the average once, before the evaluation",
}
BATCH, SIDE, WIDTH = by_device(256, 18), 32, by_device(128, 16)


def layer(before, after, stride):
    return nn.Sequential(
        nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()
    )


def prepare():
    torch.manual_seed(0)
    model = nn.Sequential(
        layer(3, WIDTH, 1),
        layer(WIDTH, 2 * WIDTH, 2),
        layer(2 * WIDTH, 2 * WIDTH, 1),
        layer(2 * WIDTH, 4 * WIDTH, 2),
        layer(4 * WIDTH, 4 * WIDTH, 1),
        layer(4 * WIDTH, 4 * WIDTH, 1),
        layer(4 * WIDTH, 4 * WIDTH, 1),
        layer(4 * WIDTH, 4 * WIDTH, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * WIDTH, 100),
    ).to(device(), memory_format=torch.channels_last)
    average = copy.deepcopy(model).requires_grad_(False)

    def batch():
        x = torch.randn(BATCH, 3, SIDE, SIDE, device=device())
        y = torch.randint(100, (BATCH,), device=device())
        return x.to(memory_format=torch.channels_last), y

    return model, average, adamw(model), in_turn(batch)


def learn(model, average, optimizer, x, y):
    with mixed():
        logits = model(x)
    loss = F.cross_entropy(logits.float(), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.01)
    return loss.detach()


def faulty():
    model, average, optimizer, data = prepare()

    def step():
        x, y = next(data)
        loss = learn(model, average, optimizer, x, y)
        with torch.no_grad(), mixed():
            average(x)  # guilty
        return loss

    return step


def clean():
    model, average, optimizer, data = prepare()

    def step():
        x, y = next(data)
        return learn(model, average, optimizer, x, y)

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
