"""The confusion matrix of a segmentation is filled pixel by pixel in a Python loop over two tensors.
A good finding names the loop over elements (thousands of tiny operations, on a GPU each with a
wait), and its line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the confusion matrix is filled one pixel at a time in Python",
    "FIX": "torch.bincount(classes * target + prediction)",
}
BATCH, SIDE, WIDTH, CLASSES = by_device(8, 6), by_device(128, 96), by_device(64, 32), 8


def network():
    return nn.Sequential(
        nn.Conv2d(3, WIDTH, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(WIDTH, 2 * WIDTH, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(2 * WIDTH, 2 * WIDTH, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(2 * WIDTH, CLASSES, 1),
    )


def by_pixel(matrix, target, prediction):
    for t, p in zip(target.view(-1), prediction.view(-1), strict=True):
        matrix[t.long(), p.long()] += 1  # guilty


def at_once(matrix, target, prediction):
    pairs = CLASSES * target.view(-1) + prediction.view(-1)
    matrix += torch.bincount(pairs, minlength=CLASSES**2).view(CLASSES, CLASSES)


def build(count):
    model = network().to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    matrix = torch.zeros(CLASSES, CLASSES, dtype=torch.long, device=device())
    data = in_turn(
        lambda: (
            torch.randn(BATCH, 3, SIDE, SIDE, device=device()),
            torch.randint(CLASSES, (BATCH, SIDE // 4, SIDE // 4), device=device()),
        )
    )

    def step():
        x, y = next(data)
        optimizer.zero_grad()
        with mixed():
            logits = model(x)
            loss = F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        count(matrix, y, logits.argmax(1))
        return loss.detach()

    return step


def faulty():
    return build(by_pixel)


def clean():
    return build(at_once)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
