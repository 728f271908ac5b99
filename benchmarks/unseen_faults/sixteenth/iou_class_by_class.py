"""A semantic segmentation network is trained at a quarter of the resolution, and the mean IoU of the
training batches is tracked beside the loss. The metric goes through the classes in Python and compares all pixels with each of them;
one pass that counts pairs of label and prediction gives the same figures.
A good finding names the loop over the classes in the IoU metric, each iteration of which reads all
pixels, and a line in it.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the IoU metric compares all pixels with each class in a Python loop",
    "FIX": "count pairs of label and prediction once (a confusion matrix by index_add_ or bincount)",
}
BATCH, SIDE, CLASSES, WIDTH = (
    by_device(16, 4),
    by_device(512, 112),
    150,
    by_device(64, 16),
)


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, 2, 1)
        self.down = nn.Conv2d(WIDTH, 2 * WIDTH, 3, 2, 1)
        self.body = nn.ModuleList(nn.Conv2d(2 * WIDTH, 2 * WIDTH, 3, padding=1) for _ in range(4))
        self.head = nn.Conv2d(2 * WIDTH, CLASSES, 1)

    def forward(self, x):
        x = F.relu(self.down(F.relu(self.stem(x))))
        for conv in self.body:
            x = x + F.relu(conv(x))
        return self.head(x)


def count_by_class(shared, either, found, labels):
    for c in range(CLASSES):
        mine, true = found == c, labels == c
        shared[c] += (mine & true).sum()
        either[c] += (mine | true).sum()  # guilty


def count_pairs(shared, either, found, labels):
    pairs = torch.zeros(CLASSES * CLASSES, dtype=torch.long, device=labels.device)
    index = (labels * CLASSES + found).flatten()
    pairs = pairs.index_add_(0, index, torch.ones_like(index)).view(CLASSES, CLASSES)
    shared += pairs.diagonal()
    either += pairs.sum(0) + pairs.sum(1) - pairs.diagonal()


def build(count):
    model = Segmenter().to(device())
    optimizer = adamw(model)
    shared = torch.zeros(CLASSES, dtype=torch.long, device=device())
    either = torch.zeros(CLASSES, dtype=torch.long, device=device())
    data = in_turn(
        lambda: (
            torch.rand(BATCH, 3, SIDE, SIDE, device=device()),
            torch.randint(CLASSES, (BATCH, SIDE // 4, SIDE // 4), device=device()),
        )
    )

    def step():
        images, labels = next(data)
        with mixed():
            scores = model(images)
            loss = F.cross_entropy(scores, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            count(shared, either, scores.argmax(1), labels)
        return loss.detach()

    return step


def faulty():
    return build(count_by_class)


def clean():
    return build(count_pairs)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
