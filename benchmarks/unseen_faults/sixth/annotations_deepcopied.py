"""A dataset deep-copies the whole record of an image, with all points of all its outlines, because
the next line adds an entry to it.
A good finding names the step's wait for data, or the time in copy.deepcopy, and its line.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the whole record of every image, outlines and all, is deep-copied although only its top level is changed",
    "FIX": "a shallow copy: dict(record)",
}
BATCH, SIDE, WIDTH = by_device(64, 16), by_device(128, 32), by_device(128, 32)
RECORDS, OBJECTS, POINTS, CLASSES = 200, 10, 40, 50


def make_records():
    outlines = torch.rand(RECORDS, OBJECTS, POINTS, 2).tolist()
    classes = torch.randint(CLASSES, (RECORDS,)).tolist()
    images = torch.randint(256, (RECORDS, 3, SIDE, SIDE), dtype=torch.uint8)
    return images, [
        {
            "number": i,
            "class": classes[i],
            "objects": [{"outline": o, "crowd": False} for o in outlines[i]],
        }
        for i in range(RECORDS)
    ]


def deep(record):
    return copy.deepcopy(record)  # guilty


def shallow(record):
    return dict(record)


def loader(copied):
    images, records = make_records()
    while True:
        for begin in range(0, RECORDS - BATCH + 1, BATCH):
            batch = []
            for record in records[begin : begin + BATCH]:
                record = copied(record)
                record["image"] = images[record["number"]]
                batch.append(record)
            x = torch.stack([r["image"] for r in batch]).to(device())
            yield x.float().div_(255), torch.tensor([r["class"] for r in batch], device=device())


def build(copied):
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
    data = loader(copied)

    def step():
        x, y = next(data)
        with mixed():
            loss = F.cross_entropy(model(x.contiguous(memory_format=torch.channels_last)), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(deep)


def clean():
    return build(shallow)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
