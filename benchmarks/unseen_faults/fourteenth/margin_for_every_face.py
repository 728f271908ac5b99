"""A network that recognizes faces is trained with an angular margin, as in ArcFace. The head is copied
from a well-known repository: it computes the cosine with the margin for every face and every
identity, with the sine, and picks the one of the right identity by a one-hot matrix of the same
size. The margin concerns one number per row.
A good finding names the margin (or the one-hot blend) computed over all classes and the line.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "the cosine with the margin is computed for all identities and blended by a one-hot matrix",
    "FIX": "gather the cosine of the right identity, add the margin to it and scatter it back",
    "BATCH": 256,
    "CPU_BATCH": 32,
}
SIDE, WIDTH, STAGES = by_device(112, 32), by_device(64, 8), 3
EMBEDDING, PEOPLE = by_device(512, 64), by_device(100_000, 4000)
SCALE, MARGIN = 30.0, 0.3
COS, SIN = math.cos(MARGIN), math.sin(MARGIN)


class Block(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(x)))


class AngularHead(nn.Module):
    def __init__(self, margin):
        super().__init__()
        self.margin = margin
        self.weight = nn.Parameter(torch.randn(PEOPLE, EMBEDDING))

    def forward(self, features, labels):
        cosine = F.linear(F.normalize(features), F.normalize(self.weight)).float()
        return self.margin(cosine, labels) * SCALE


def with_margin(cosine):
    sine = torch.sqrt((1.0 - cosine.square()).clamp(1e-6, 1.0))
    return cosine * COS - sine * SIN


def for_all(cosine, labels):
    phi = with_margin(cosine)  # guilty
    one_hot = torch.zeros_like(cosine).scatter_(1, labels[:, None], 1.0)
    return one_hot * phi + (1.0 - one_hot) * cosine


def for_the_right_one(cosine, labels):
    phi = with_margin(cosine.gather(1, labels[:, None]))
    return cosine.scatter(1, labels[:, None], phi)


class Faces(nn.Module):
    def __init__(self, margin):
        super().__init__()
        widths = [3] + [WIDTH * 2**stage for stage in range(STAGES)]
        self.stages = nn.Sequential(*map(Block, widths[:-1], widths[1:]))
        self.embed = nn.Linear(widths[-1], EMBEDDING)
        self.head = AngularHead(margin)

    def forward(self, images, labels):
        return self.head(self.embed(self.stages(images).mean((2, 3))), labels)


def loss_of(model, batch):
    images, labels = batch
    with mixed():
        return F.cross_entropy(model(images, labels), labels)


def batches(size):
    def make():
        images = torch.randn(size, 3, SIDE, SIDE, device=device())
        images = images.to(memory_format=torch.channels_last)
        return images, torch.randint(PEOPLE, (size,), device=device())

    return in_turn(make)


def build(margin):
    import steplab

    model = Faces(margin).to(memory_format=torch.channels_last)
    return steplab.UserModel(model, batches, loss_of, optimizer=adamw)


def faulty():
    return build(for_all)


def clean():
    return build(for_the_right_one)
