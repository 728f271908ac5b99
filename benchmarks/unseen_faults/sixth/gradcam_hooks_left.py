"""Hooks for Grad-CAM keep the features of every layer and, through retain_grad, their gradients. They
were left on for training, where nobody looks at either.
A good finding names the features and their gradients that are kept beyond the backward pass, and the
line of the hook that keeps them.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "hooks keep the features of all layers and their gradients, which only Grad-CAM would read",
    "FIX": "register the hooks when a map is drawn, and remove them after it",
}
BATCH, SIDE, WIDTH, LAYERS, CLASSES = (
    by_device(64, 6),
    by_device(128, 64),
    by_device(128, 32),
    6,
    10,
)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH // 8), nn.ReLU())
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))


def prepare():
    model = Network().to(device(), memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, 3, SIDE, SIDE, device=device()).contiguous(
                memory_format=torch.channels_last
            ),
            torch.randint(CLASSES, (BATCH,), device=device()),
        ),
        2,
    )
    return model, optimizer, data


def update(model, optimizer, x, y):
    with mixed():
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, optimizer, data = prepare()
    features = {}

    def keep(layer, inputs, output):
        output.retain_grad()
        features[layer] = output  # guilty

    for layer in model.layers:
        layer.register_forward_hook(keep)

    def step():
        return update(model, optimizer, *next(data))

    return step


def clean():
    model, optimizer, data = prepare()

    def step():
        return update(model, optimizer, *next(data))

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
