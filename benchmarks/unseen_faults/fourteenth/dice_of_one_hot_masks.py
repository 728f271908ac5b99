"""A network labels every pixel of street scenes with one of thirty-two classes and is trained with the
Dice loss. The loss turns the labels into one-hot masks, of 64-bit integers and then of floats, and
multiplies the probabilities by them: three more tensors of the largest size there is. The overlap
of each class is the probability at the label, added up by class.
A good finding names the one-hot masks (the peak of the memory is in the loss) and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "the Dice loss makes one-hot masks of the labels, as integers of 64 bits and as floats",
    "FIX": "gather the probability at the label and add it up by class with scatter_add",
}
BATCH, SIDE, WIDTH, CLASSES = by_device(16, 2), by_device(512, 96), by_device(64, 8), 32


def conv(before, after, stride=1):
    return nn.Sequential(
        nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
    )


class Street(nn.Module):
    def __init__(self):
        super().__init__()
        self.fine = conv(3, WIDTH, 2)
        self.coarse = nn.Sequential(conv(WIDTH, 4 * WIDTH, 2), conv(4 * WIDTH, 4 * WIDTH))
        self.rise = nn.ConvTranspose2d(4 * WIDTH, WIDTH, 2, stride=2)
        self.head = nn.ConvTranspose2d(WIDTH, CLASSES, 2, stride=2)

    def forward(self, images):
        fine = self.fine(images)
        return self.head(F.relu(fine + self.rise(self.coarse(fine)), inplace=True))


def by_masks(shares, labels):
    masks = F.one_hot(labels, CLASSES).permute(0, 3, 1, 2).float()  # guilty
    overlap = (shares * masks).sum((2, 3))
    return overlap, masks.sum((2, 3))


def by_labels(shares, labels):
    right = shares.gather(1, labels[:, None]).flatten(1)
    empty, where = right.new_zeros(len(labels), CLASSES), labels.flatten(1)
    return empty.scatter_add(1, where, right), empty.scatter_add(1, where, torch.ones_like(right))


def dice(logits, labels, overlaps):
    shares = logits.float().softmax(1)
    overlap, sizes = overlaps(shares, labels)
    return 1 - (2 * overlap / (shares.sum((2, 3)) + sizes + 1)).mean()


def build(overlaps):
    layout = {"memory_format": torch.channels_last}
    model = Street().to(device(), **layout)
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, 3, SIDE, SIDE, device=device()).to(**layout),
            torch.randint(CLASSES, (BATCH, SIDE, SIDE), device=device()),
        ),
        4,
    )

    def step():
        images, labels = next(data)
        with mixed():
            loss = dice(model(images), labels, overlaps)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(by_masks)


def clean():
    return build(by_labels)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
