"""A segmentation network accumulates the gradients of six micro-batches. The logits of all of them are
collected and concatenated for the pixel accuracy at the end of the step.
A good finding names the logits of all micro-batches that are kept for a metric, and the line that does it.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "the logits of all micro-batches are kept and concatenated for a metric although it needs one count each",
    "FIX": "count the right pixels of each micro-batch and keep only the count",
}
PARTS, BATCH, SIDE = 6, by_device(16, 2), by_device(256, 48)
WIDTH, CLASSES = by_device(64, 12), 150


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.second = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.head = nn.Conv2d(WIDTH, CLASSES, 1)

    def forward(self, images):
        return self.head(F.relu(self.second(F.relu(self.first(images)))))


def prepare():
    torch.manual_seed(0)
    model = Segmenter().to(device())
    data = in_turn(
        lambda: (
            torch.randn(BATCH, 3, SIDE, SIDE, device=device()),
            torch.randint(CLASSES, (BATCH, SIDE, SIDE), device=device()),
        )
    )
    return model, adamw(model), data, {}


def learn(model, images, labels):
    with mixed():
        logits = model(images)
    loss = F.cross_entropy(logits, labels) / PARTS
    loss.backward()
    return loss.detach(), logits.detach()


def faulty():
    model, optimizer, data, metrics = prepare()

    def step():
        total, outputs, targets = 0.0, [], []
        for _ in range(PARTS):
            images, labels = next(data)
            loss, logits = learn(model, images, labels)
            total = total + loss
            outputs.append(logits)  # guilty
            targets.append(labels)
        optimizer.step()
        optimizer.zero_grad()
        right = torch.cat(outputs).argmax(1) == torch.cat(targets)
        metrics["accuracy"] = right.sum() / right.numel()
        return total

    return step


def clean():
    model, optimizer, data, metrics = prepare()

    def step():
        total, right, pixels = 0.0, 0, 0
        for _ in range(PARTS):
            images, labels = next(data)
            loss, logits = learn(model, images, labels)
            total = total + loss
            right = right + (logits.argmax(1) == labels).sum()
            pixels += labels.numel()
            del logits
        optimizer.step()
        optimizer.zero_grad()
        metrics["accuracy"] = right / pixels
        return total

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
