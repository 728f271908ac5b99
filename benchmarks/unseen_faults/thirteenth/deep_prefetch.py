"""A network for scans of four modalities gets its batches from a queue that copies them to the device
ahead of time. The queue is 16 batches deep, so 16 batches of whole volumes lie in the memory of the
device although one is used at a time. Two are enough to hide the copy.
A good finding names the batches waiting on the device and the line.
"""

from collections import deque

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "the queue of prefetched batches keeps 16 batches of volumes on the device",
    "FIX": "prefetch two batches",
}
BATCH, SIDE, MODALITIES, CLASSES = 2, by_device(128, 32), 4, 4
WIDTH, LAYERS = by_device(48, 10), by_device(5, 4)


class Unit(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm3d(WIDTH)

    def forward(self, x):
        return x + F.relu(self.norm(self.conv(x)), inplace=True)


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv3d(MODALITIES, WIDTH, 2, stride=2)
        self.units = nn.Sequential(*[Unit() for _ in range(LAYERS)])
        self.head = nn.Conv3d(WIDTH, CLASSES, 1)

    def forward(self, x):
        return self.head(self.units(self.stem(x)))


class Prefetched:
    """Batches on the device, `depth` of them ahead."""

    def __init__(self, source, depth):
        self.source, self.queue = source, deque()
        for _ in range(depth):
            self.load()

    def load(self):
        batch = next(self.source)
        self.queue.append([v.to(device(), non_blocking=True, copy=True) for v in batch])  # guilty

    def __next__(self):
        batch = self.queue.popleft()
        self.load()
        return batch


def scans():
    """Return a batch on the host: volumes and classes at half the resolution."""
    volumes = torch.randn(BATCH, MODALITIES, SIDE, SIDE, SIDE)
    volumes = volumes.to(memory_format=torch.channels_last_3d)
    classes = torch.randint(CLASSES, (BATCH, SIDE // 2, SIDE // 2, SIDE // 2))
    return [v.pin_memory() if device() == "cuda" else v for v in (volumes, classes)]


def build(depth):
    model = Segmenter().to(device(), memory_format=torch.channels_last_3d)
    optimizer, data = adamw(model), Prefetched(in_turn(scans, 3), depth)

    def step():
        volumes, classes = next(data)
        with mixed():
            loss = F.cross_entropy(model(volumes), classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(16)


def clean():
    return build(2)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
