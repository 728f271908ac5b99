"""The hardest image of every batch is kept in a list to be looked at later. It is kept as a view of
the batch, so the images of the whole batch stay in memory for it.
A good finding names memory that grows by a batch per step, and the line that appends the image.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "one image of each batch is kept as a view, which keeps the whole batch alive",
    "FIX": "keep a copy of that image: images[worst].clone()",
}
BATCH, SIZE, WIDTH, CLASSES = by_device(256, 128), by_device(128, 128), by_device(64, 12), 10
SAMPLES = by_device(4096, 384)


def prepare():
    pixels = torch.randint(256, (SAMPLES, 3, SIZE, SIZE), dtype=torch.uint8, device=device())
    labels = torch.randint(CLASSES, (SAMPLES,), device=device())
    model = nn.Sequential(
        nn.Conv2d(3, WIDTH, 4, 4),
        nn.ReLU(),
        nn.Conv2d(WIDTH, 2 * WIDTH, 3, 2, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(32 * WIDTH, CLASSES),
    ).to(device())

    def batches():
        while True:
            for start in range(0, SAMPLES, BATCH):
                images = pixels[start : start + BATCH].float().div_(255)
                yield images, labels[start : start + BATCH]

    return model, adamw(model), batches()


def train(model, optimizer, images, labels):
    with mixed():
        losses = F.cross_entropy(model(images), labels, reduction="none")
    loss = losses.mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), losses.detach()


def faulty():
    model, optimizer, data = prepare()
    hardest = []

    def step():
        images, labels = next(data)
        loss, losses = train(model, optimizer, images, labels)
        hardest.append(images[losses.argmax().item()])  # guilty
        return loss

    return step


def clean():
    model, optimizer, data = prepare()
    hardest = []

    def step():
        images, labels = next(data)
        loss, losses = train(model, optimizer, images, labels)
        hardest.append(images[losses.argmax().item()].clone())
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
