"""Distillation with two losses, of the logits and of the features. The teacher gives both at once,
but is called once for each of them.
A good finding names that the teacher computes the same twice, and the line of its second call.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the teacher runs on the same images once per loss although one run gives logits and features",
    "FIX": "features, logits = teacher(images), once",
}
BATCH, SIZE, CLASSES = by_device(256, 48), 32, 100
TEACHER, STUDENT = by_device(256, 64), by_device(64, 12)


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, 1, 1),
            nn.ReLU(),
        )
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, x):
        features = self.body(x).mean((2, 3))
        return features, self.head(features)


def prepare():
    teacher = Net(TEACHER).to(device()).eval().requires_grad_(False)
    student = nn.ModuleList([Net(STUDENT), nn.Linear(2 * STUDENT, 2 * TEACHER)]).to(device())
    images = in_turn(lambda: torch.randn(BATCH, 3, SIZE, SIZE, device=device()))
    return teacher, student, adamw(student), images


def update(student, optimizer, images, features, logits):
    with mixed():
        net, adapter = student
        own, guess = net(images)
        loss = F.mse_loss(adapter(own), features) + F.mse_loss(guess, logits)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    teacher, student, optimizer, data = prepare()

    def step():
        images = next(data)
        with torch.no_grad(), mixed():
            logits = teacher(images)[1]
            features = teacher(images)[0]  # guilty
        return update(student, optimizer, images, features, logits)

    return step


def clean():
    teacher, student, optimizer, data = prepare()

    def step():
        images = next(data)
        with torch.no_grad(), mixed():
            features, logits = teacher(images)
        return update(student, optimizer, images, features, logits)

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
