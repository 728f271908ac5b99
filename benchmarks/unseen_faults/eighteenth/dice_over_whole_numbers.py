"""Organs are segmented in slices of a scan, with cross-entropy and the Dice loss. For the latter the labels are
made one-hot, which gives eight bytes for each class of each pixel with the classes innermost, and then
turned round and made floats: several passes over tensors larger than the logits, for a mask that says of
each pixel one class. The overlap is a gather of the probabilities at the labels and a sum over each class.
A good finding names the one-hot labels as int64 (or their copies and conversion) and their line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "labels become int64 one-hot masks, are permuted and converted for the Dice loss",
    "FIX": "gather the probability at each label and add it up by class; count the labels by bincount",
}
BATCH, SIDE, ORGANS = by_device(16, 4), by_device(384, 96), by_device(64, 32)
WIDTH, LAYERS = by_device(64, 16), by_device(6, 3)


class SliceNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, WIDTH, 4, stride=4)
        self.layers = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.BatchNorm2d(WIDTH) for _ in range(LAYERS))
        self.head = nn.ConvTranspose2d(WIDTH, ORGANS, 4, stride=4)

    def forward(self, slices):
        x = self.stem(slices)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.relu(norm(layer(x)))
        return self.head(x)


def overlap_by_masks(chance, labels):
    masks = F.one_hot(labels, ORGANS).permute(0, 3, 1, 2).float()  # guilty
    return (chance * masks).sum((0, 2, 3)), masks.sum((0, 2, 3))


def overlap_by_gather(chance, labels):
    hit = chance.gather(1, labels[:, None]).flatten()
    overlap = hit.new_zeros(ORGANS).index_add(0, labels.flatten(), hit)
    return overlap, torch.bincount(labels.flatten(), minlength=ORGANS)


def make(overlap_of):
    torch.manual_seed(0)
    model = SliceNet().to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def batch():
        slices = torch.randn(BATCH, 1, SIDE, SIDE, device=device())
        return slices, torch.randint(ORGANS, (BATCH, SIDE, SIDE), device=device())

    batches = in_turn(batch, 4)

    def step():
        slices, labels = next(batches)
        with mixed():
            logits = model(slices).float()
        chance = logits.softmax(1)
        overlap, size = overlap_of(chance, labels)
        dice = 1 - (2 * overlap + 1) / (chance.sum((0, 2, 3)) + size + 1)
        loss = F.cross_entropy(logits, labels) + dice.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def faulty():
    return make(overlap_by_masks)


def clean():
    return make(overlap_by_gather)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
