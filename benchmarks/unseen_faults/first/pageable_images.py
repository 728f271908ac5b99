"""An image classifier whose batches come from host memory. Own loop."""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, device, main, pick

FAULT = {
    "NAME": "pageable_images",
    "CAUSE": "Each batch is copied to the GPU from ordinary pageable memory at the beginning of the step, so the copy is slow and nothing runs beside it.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Pin the batches and copy the next one with non_blocking=True on a stream of its own while this step computes.",
    "STYLE": "loop",
}
BATCH, SIDE, CHANNELS, BLOCKS = pick(128, 2), pick(224, 32), pick(256, 8), pick(3, 1)


def network():
    layers = [nn.Conv2d(3, CHANNELS, 4, stride=4)]
    for _ in range(BLOCKS):
        layers += [
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False),
            nn.BatchNorm2d(CHANNELS),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, 1000))


class Prefetcher:
    """Copies the next batch on a side stream."""

    def __init__(self, batches, dev):
        self.batches, self.dev, self.count = batches, dev, 0
        self.stream = torch.cuda.Stream() if dev == "cuda" else None
        self.fetch()

    def fetch(self):
        self.count += 1
        with torch.cuda.stream(self.stream):
            self.ready = self.batches[self.count % len(self.batches)].to(
                self.dev, non_blocking=True
            )

    def next(self):
        batch = self.ready
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
            batch.record_stream(torch.cuda.current_stream())
        self.fetch()
        return batch


def make(pageable):
    dev = device()
    model = network().to(dev, memory_format=torch.channels_last)
    optimizer = adamw(model)
    labels = torch.randint(1000, (BATCH,), device=dev)
    images = [
        torch.rand(BATCH, 3, SIDE, SIDE).contiguous(memory_format=torch.channels_last)
        for _ in range(3)
    ]
    if pageable:
        count = 0

        def fetch():
            nonlocal count
            count += 1
            return images[count % 3].to(dev)  # FAULT

    else:
        fetch = Prefetcher([i.pin_memory() if dev == "cuda" else i for i in images], dev).next

    def step():
        batch = fetch()
        with torch.autocast(dev, torch.bfloat16):
            loss = F.cross_entropy(model(batch), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main(faulty=lambda: make(True), clean=lambda: make(False))
