"""The loop registers a hook for the features of a layer in every step and never removes one, so the
hundredth step copies the features a hundred times and holds a hundred copies.
A good finding names the hooks that accumulate (time and memory grow from step to step), and the
line that registers them.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "a forward hook is registered in every step and never removed: each old one copies the features again and keeps its copy",
    "FIX": "register it once, or remove it after the step",
}
BATCH, SIDE, WIDTH = by_device(128, 16), by_device(64, 64), by_device(64, 16)


def network():
    def block(a, b):
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())

    return nn.Sequential(
        block(3, WIDTH),
        block(WIDTH, WIDTH),
        nn.MaxPool2d(2),
        block(WIDTH, 2 * WIDTH),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * WIDTH, 10),
    )


def keeper(features):
    def hook(module, inputs, output):
        features["middle"] = output.detach().float().clone()
        features["dead"] = (features["middle"] <= 0).float().mean(dim=(0, 2, 3))

    return hook


def prepare():
    model = network().to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, 3, SIDE, SIDE, device=device()),
            torch.randint(10, (BATCH,), device=device()),
        )
    )
    return model, optimizer, data


def train_step(model, optimizer, data, features):
    x, y = next(data)
    optimizer.zero_grad()
    with mixed():
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    dead = features["dead"].max()
    return loss.detach(), dead


def faulty():
    model, optimizer, data = prepare()

    def step():
        features = {}
        model[1].register_forward_hook(keeper(features))  # guilty
        return train_step(model, optimizer, data, features)[0]

    return step


def clean():
    model, optimizer, data = prepare()

    def step():
        features = {}
        handle = model[1].register_forward_hook(keeper(features))
        loss, _ = train_step(model, optimizer, data, features)
        handle.remove()
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
