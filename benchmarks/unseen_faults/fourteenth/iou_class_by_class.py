"""A network labels the points of LiDAR scans and logs the intersection over union of each class in
every step. The metric loops over the classes: two comparisons over all points, an "and", an "or" and
two sums for each, and an `.item()` for each number. One `bincount` of label times classes plus guess
gives all counts in one pass.
A good finding names the metric's loop over the classes (its small operators, or the waits on a GPU),
and its line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the intersection over union is counted class by class in a Python loop over masks of all points, with .item() for each",
    "FIX": "count a confusion matrix by one bincount and read it when it is logged",
}
SCANS, POINTS = by_device(16, 2), by_device(32_768, 6144)
WIDTH, CLASSES, SEEN = by_device(384, 24), 40, 4


class Points(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = nn.Sequential(
            nn.Linear(SEEN, WIDTH),
            nn.ReLU(inplace=True),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(inplace=True),
        )
        self.scan = nn.Linear(WIDTH, WIDTH)
        self.classes = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, CLASSES)
        )

    def forward(self, points):
        x = self.own(points)
        return self.classes(x + self.scan(x.amax(1, keepdim=True)))


def class_by_class(guess, labels):
    found = []
    for c in range(CLASSES):
        both = ((guess == c) & (labels == c)).sum().item()  # guilty
        either = ((guess == c) | (labels == c)).sum().item()
        found.append(both / max(either, 1))
    return found


def by_counts(guess, labels):
    pairs = (labels * CLASSES + guess).flatten()
    counts = torch.bincount(pairs, minlength=CLASSES**2).view(CLASSES, CLASSES)
    both = counts.diagonal()
    return both / (counts.sum(0) + counts.sum(1) - both).clamp(min=1)


def build(measure):
    model = Points().to(device())
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.randn(SCANS, POINTS, SEEN, device=device()),
            torch.randint(CLASSES, (SCANS, POINTS), device=device()),
        )
    )
    history = []

    def step():
        points, labels = next(data)
        with mixed():
            scores = model(points)
            loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(measure(scores.detach().argmax(-1), labels))
        return loss.detach()

    return step


def faulty():
    return build(class_by_class)


def clean():
    return build(by_counts)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
