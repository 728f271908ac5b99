"""Images of bytes that are normalized before they reach the network. Own loop."""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, device, main, pick

FAULT = {
    "NAME": "host_normalize",
    "CAUSE": "The images are converted to fp32 and normalized on the CPU in the training loop, and four times the bytes are then copied from pageable memory.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Copy the bytes (pinned, non_blocking) and normalize on the device.",
    "STYLE": "loop",
    "WHY": "Elementwise arithmetic over ten million pixels runs on the CPU in every step, and its fp32 result is copied while the device waits; the bytes are a quarter of that and the device normalizes them in microseconds.",
    "GAIN_MS": None,
}
BATCH, SIDE, CHANNELS, BLOCKS = pick(128, 2), pick(160, 16), pick(256, 8), pick(6, 1)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 4, stride=4)
        self.body = nn.Sequential(*[Residual() for _ in range(BLOCKS)])
        self.head = nn.Linear(CHANNELS, 128)

    def forward(self, images):
        return self.head(self.body(self.stem(images)).mean((2, 3)))


def make(on_host):
    dev = device()
    torch.manual_seed(0)
    model = Network().to(dev, memory_format=torch.channels_last)
    optimizer = adamw(model)
    stored = [
        torch.randint(256, (BATCH, 3, SIDE, SIDE), dtype=torch.uint8).contiguous(
            memory_format=torch.channels_last
        )
        for _ in range(4)
    ]
    if dev == "cuda":
        stored = [images.pin_memory() for images in stored]
    labels = torch.randint(128, (4, BATCH), device=dev)
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    spread = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    if not on_host:
        mean, spread = mean.to(dev), spread.to(dev)
    count = 0

    def step():
        nonlocal count
        images = stored[count % 4]
        if on_host:
            images = ((images.float() / 255 - mean) / spread).to(dev)  # FAULT
        else:
            images = (images.to(dev, non_blocking=True).float() / 255 - mean) / spread
        with torch.autocast(dev, torch.bfloat16):
            loss = F.cross_entropy(model(images), labels[count % 4])
        count += 1
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return make(on_host=True)


def clean():
    return make(on_host=False)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
