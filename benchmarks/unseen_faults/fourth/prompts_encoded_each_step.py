"""The image tower of a contrastive model is tuned against the class names. The text tower is frozen
and the names never change, yet they are encoded anew in every step.
A good finding names the text tower's forward on inputs that do not change, and the line that calls
it.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import Decoder, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "a frozen text tower encodes the same class names in every step",
    "FIX": "encode them once before the loop",
}
BATCH, SIDE, CHANNELS = by_device(256, 12), by_device(64, 32), by_device(128, 32)
CLASSES, LENGTH, WIDTH, LAYERS = (
    by_device(1000, 40),
    by_device(32, 12),
    by_device(512, 128),
    by_device(8, 3),
)
VOCAB, SCALE = 2000, 20.0


def prepare():
    text = Decoder(WIDTH, LAYERS, VOCAB, LENGTH).to(device()).eval().requires_grad_(False)
    names = torch.randint(VOCAB, (CLASSES, LENGTH), device=device())
    image = nn.Sequential(
        nn.Conv2d(3, CHANNELS, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(CHANNELS, 2 * CHANNELS, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(2 * CHANNELS, 4 * CHANNELS, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * CHANNELS, WIDTH),
    ).to(device(), memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(image.parameters(), lr=1e-3, fused=True)
    images = in_turn(
        lambda: (
            torch.randn(BATCH, 3, SIDE, SIDE, device=device()).contiguous(
                memory_format=torch.channels_last
            ),
            torch.randint(CLASSES, (BATCH,), device=device()),
        )
    )
    return text, names, image, optimizer, images


@torch.no_grad()
def encode(text, names):
    with mixed():
        return F.normalize(text.hidden(names)[:, -1], dim=-1)


def update(image, optimizer, x, y, classes):
    with mixed():
        loss = F.cross_entropy(SCALE * F.normalize(image(x), dim=-1) @ classes.T, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    text, names, image, optimizer, images = prepare()

    def step():
        classes = encode(text, names)  # guilty
        return update(image, optimizer, *next(images), classes)

    return step


def clean():
    text, names, image, optimizer, images = prepare()
    classes = encode(text, names)

    def step():
        return update(image, optimizer, *next(images), classes)

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
