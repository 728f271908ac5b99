"""A segmentation with 150 classes logs the mean IoU of its images. Intersection and union are counted
image by image and class by class, with comparisons of all pixels for each of them.
A good finding names the thousands of comparisons and sums of the metric, and the line in the loop
over the classes.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the IoU of each image compares all its pixels with every one of 150 classes, one after the other",
    "FIX": "one torch.bincount of (image * classes + target) * classes + prediction",
}
BATCH, SIDE, WIDTH, CLASSES = by_device(16, 2), by_device(512, 144), by_device(256, 24), 150


def prepare():
    model = nn.Sequential(
        nn.Conv2d(3, WIDTH, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(WIDTH, 2 * WIDTH, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(2 * WIDTH, 2 * WIDTH, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(2 * WIDTH, CLASSES, 1),
    ).to(device(), memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, 3, SIDE, SIDE, device=device()).contiguous(
                memory_format=torch.channels_last
            ),
            torch.randint(CLASSES, (BATCH, SIDE // 4, SIDE // 4), device=device()),
        )
    )
    return model, optimizer, data


def iou_by_loop(found, target):
    values = []
    for image, goal in zip(found, target, strict=True):
        for c in range(CLASSES):
            here, there = image == c, goal == c
            values.append((here & there).sum() / (here | there).sum().clamp(min=1))  # guilty
    return torch.stack(values).mean()


def iou_by_count(found, target):
    image = torch.arange(len(found), device=found.device)[:, None, None]
    pairs = ((image * CLASSES + target) * CLASSES + found).flatten()
    counts = torch.bincount(pairs, minlength=len(found) * CLASSES**2)
    counts = counts.view(len(found), CLASSES, CLASSES)
    both = counts.diagonal(dim1=1, dim2=2)
    either = counts.sum(1) + counts.sum(2) - both
    return (both / either.clamp(min=1)).mean()


def build(iou):
    model, optimizer, data = prepare()
    log = {}

    def step():
        images, target = next(data)
        with mixed():
            logits = model(images)
            loss = F.cross_entropy(logits, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log["iou"] = iou(logits.detach().argmax(1), target)
        return loss.detach()

    return step


def faulty():
    return build(iou_by_loop)


def clean():
    return build(iou_by_count)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
