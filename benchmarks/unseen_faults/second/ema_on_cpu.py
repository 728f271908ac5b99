"""A convolutional network with a moving average of its weights. Own loop."""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, device, main, pick

FAULT = {
    "NAME": "ema_on_cpu",
    "CAUSE": "The moving average of the weights lives on the CPU, so every step copies all weights to the host, tensor by tensor, and averages them there.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Keep the average on the device, where it takes a few dozen MB, and update it with torch._foreach_lerp_.",
    "STYLE": "loop",
    "WHY": "One blocking copy to pageable memory per parameter and an average on the CPU after every update, while the device idles; on the device it is one pass over the weights.",
    "GAIN_MS": None,
}
BATCH, SIDE, CHANNELS, BLOCKS = pick(24, 2), pick(128, 8), pick(256, 8), pick(8, 1)


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
        self.stem = nn.Conv2d(3, CHANNELS, 2, stride=2)
        self.body = nn.Sequential(*[Residual() for _ in range(BLOCKS)])
        self.head = nn.Linear(CHANNELS, 128)

    def forward(self, images):
        return self.head(self.body(self.stem(images)).mean((2, 3)))


def make(on_cpu):
    dev = device()
    torch.manual_seed(0)
    model = Network().to(dev, memory_format=torch.channels_last)
    optimizer = adamw(model)
    images = [
        torch.randn(BATCH, 3, SIDE, SIDE, device=dev).to(memory_format=torch.channels_last)
        for _ in range(4)
    ]
    labels = torch.randint(128, (4, BATCH), device=dev)
    weights = [p.detach() for p in model.parameters()]
    averages = [w.to("cpu" if on_cpu else dev, copy=True) for w in weights]
    count = 0

    def step():
        nonlocal count
        with torch.autocast(dev, torch.bfloat16):
            loss = F.cross_entropy(model(images[count % 4]), labels[count % 4])
        count += 1
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if on_cpu:
            for average, weight in zip(averages, weights, strict=True):
                average.lerp_(weight.cpu(), 0.001)  # FAULT
        else:
            torch._foreach_lerp_(averages, weights, 0.001)
        return loss.detach()

    return step


def faulty():
    return make(on_cpu=True)


def clean():
    return make(on_cpu=False)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
