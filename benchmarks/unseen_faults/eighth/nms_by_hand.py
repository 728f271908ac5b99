"""A detector removes overlapping proposals before its second stage. The suppression is written in
Python: take the best box, compare it with the rest, drop those that overlap, and so on; each round
launches a dozen tiny kernels and waits for the device to learn how many boxes are left.
A good finding names the loop's waits (or its launches), and a line of the loop.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.ops import nms

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "non-maximum suppression is a Python loop over the boxes, which waits for the device in every round",
    "FIX": "torchvision.ops.nms",
}
IMAGES, GRID, CLASSES = by_device(8, 2), by_device(64, 24), 20
WIDTH, LAYERS, KEPT, OVERLAP = by_device(512, 32), by_device(6, 2), by_device(50, 40), 0.5


def nms_loop(boxes, scores, overlap):
    """Return the numbers of the boxes to keep, best first."""
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    left, keep = scores.argsort(descending=True), []
    while left.numel() > 0 and len(keep) < KEPT:
        best, left = left[:1], left[1:]
        keep.append(best)
        low = torch.maximum(boxes[best, :2], boxes[left, :2])
        high = torch.minimum(boxes[best, 2:], boxes[left, 2:])
        shared = (high - low).clamp(min=0).prod(1)
        left = left[shared / (area[best] + area[left] - shared) <= overlap]  # guilty
    return torch.cat(keep)


class Detector(nn.Module):
    def __init__(self, suppress):
        super().__init__()
        self.suppress = suppress
        layers = [nn.Conv2d(3, WIDTH, 4, 4), nn.ReLU()]
        for _ in range(LAYERS):
            layers += [nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.ReLU()]
        self.trunk, self.propose = nn.Sequential(*layers), nn.Conv2d(WIDTH, 5, 1)
        self.classify = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))
        line = torch.arange(GRID) * 4.0
        self.register_buffer("corner", torch.cartesian_prod(line, line))

    def forward(self, images):
        features = self.trunk(images)
        found = self.propose(features).float().flatten(2).transpose(1, 2)
        features = features.flatten(2).transpose(1, 2)
        sizes = 8 + 8 * found[..., 1:3].sigmoid()
        start = self.corner + found[..., 3:]
        boxes, scores = torch.cat([start, start + sizes], -1), found[..., 0]
        with torch.no_grad():
            kept = [self.suppress(b, s, OVERLAP)[:KEPT] for b, s in zip(boxes, scores, strict=True)]
        chosen = torch.stack([f[k] for f, k in zip(features, kept, strict=True)])
        return boxes, scores, self.classify(chosen)


def batch():
    images = torch.randn(IMAGES, 3, 4 * GRID, 4 * GRID, device=device())
    return (
        images.to(memory_format=torch.channels_last),
        torch.rand(IMAGES, GRID * GRID, 4, device=device()) * 4 * GRID,
        torch.rand(IMAGES, GRID * GRID, device=device()).round(),
        torch.randint(CLASSES, (IMAGES, KEPT), device=device()),
    )


def build(suppress):
    model = Detector(suppress).to(device(), memory_format=torch.channels_last)
    optimizer, data = adamw(model), in_turn(batch)

    def step():
        images, true_boxes, objects, classes = next(data)
        with mixed():
            boxes, scores, guess = model(images)
            loss = F.cross_entropy(guess.flatten(0, 1), classes.flatten())
            loss = loss + F.binary_cross_entropy_with_logits(scores, objects)
            loss = loss + F.smooth_l1_loss(boxes, true_boxes) / GRID
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(nms_loop)


def clean():
    return build(nms)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
