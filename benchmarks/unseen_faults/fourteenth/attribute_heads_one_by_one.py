"""A network tags pieces of clothing with sixty yes-or-no attributes. Each attribute has a head of
its own in a ModuleDict and a loss of its own, and a loop goes through them: sixty tiny layers and
sixty tiny losses, forward and backward. As the heads are all alike, they are one linear layer with
sixty outputs and one loss.
A good finding names the loop of many small heads (or of their small losses) and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "sixty heads with one output and their losses are computed one after the other in a loop",
    "FIX": "one linear layer with an output per attribute, and one loss",
}
BATCH, SIDE, ATTRIBUTES = by_device(64, 24), by_device(128, 32), 60
WIDTHS = [by_device(64, 16), by_device(128, 32), by_device(256, 64)]


class Stage(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.down = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
        self.conv = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)

    def forward(self, x):
        x = F.relu(self.norm1(self.down(x)))
        return F.relu(x + self.norm2(self.conv(x)))


class ManyHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict({f"a{i}": nn.Linear(WIDTHS[-1], 1) for i in range(ATTRIBUTES)})

    def forward(self, features, tags):
        loss = 0.0
        for index, head in enumerate(self.heads.values()):
            logit = head(features).squeeze(1)  # guilty
            loss = loss + F.binary_cross_entropy_with_logits(logit, tags[:, index])
        return loss / ATTRIBUTES


class OneHead(nn.Module):
    def __init__(self):
        super().__init__()
        heads = ManyHeads().heads.values()
        self.head = nn.Linear(WIDTHS[-1], ATTRIBUTES)
        with torch.no_grad():
            self.head.weight.copy_(torch.cat([head.weight for head in heads]))
            self.head.bias.copy_(torch.cat([head.bias for head in heads]))

    def forward(self, features, tags):
        return F.binary_cross_entropy_with_logits(self.head(features), tags)


class Clothes(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.stages = nn.Sequential(*map(Stage, [3, *WIDTHS[:-1]], WIDTHS))
        self.head = head()

    def forward(self, images, tags):
        return self.head(self.stages(images).mean((2, 3)), tags)


def build(head):
    layout = {"memory_format": torch.channels_last}
    model = Clothes(head).to(device(), **layout)
    optimizer = adamw(model)
    generator = torch.Generator().manual_seed(1)

    def make():
        images = torch.randn(BATCH, 3, SIDE, SIDE, generator=generator)
        tags = (torch.rand(BATCH, ATTRIBUTES, generator=generator) < 0.2).float()
        return images.to(device(), **layout), tags.to(device())

    data = in_turn(make)

    def step():
        with mixed():
            loss = model(*next(data))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(ManyHeads)


def clean():
    return build(OneHead)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
