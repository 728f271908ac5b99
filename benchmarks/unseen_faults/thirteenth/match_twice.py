"""A detector has a loss for classes and a loss for boxes. Each of them calls `match`, which computes the
overlap of all anchors with all true boxes of every image and takes the best: the same matching
is computed twice per step. Matched once, both losses can use it.
A good finding names the second matching (the overlaps computed twice) and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "anchors and true boxes are matched once for the classes and once more for the boxes",
    "FIX": "match once per step and give the result to both losses",
}
SIDE, SHAPES, BOXES, CLASSES = by_device(96, 32), 9, by_device(100, 24), by_device(20, 4)
BATCH, WIDTH, LAYERS = by_device(16, 4), by_device(256, 16), by_device(4, 2)


def corners(boxes):
    """Turn centers and sizes into corners."""
    return torch.cat([boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2], -1)


def make_anchors():
    at = (torch.arange(SIDE, device=device()) + 0.5) / SIDE
    y, x = torch.meshgrid(at, at, indexing="ij")
    size = torch.linspace(0.05, 0.5, SHAPES, device=device())
    centers = torch.stack([x, y], -1)[:, :, None].expand(SIDE, SIDE, SHAPES, 2)
    return torch.cat([centers, size[:, None].expand(SIDE, SIDE, SHAPES, 2)], -1).reshape(-1, 4)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [3] + [WIDTH] * LAYERS
        tower = []
        for before, after in zip(widths, widths[1:], strict=False):
            tower += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(inplace=True)]
        self.tower = nn.Sequential(*tower)
        self.classes = nn.Conv2d(WIDTH, SHAPES * CLASSES, 1)
        self.boxes = nn.Conv2d(WIDTH, SHAPES * 4, 1)

    def forward(self, x):
        x = self.tower(x)
        classes, boxes = self.classes(x).permute(0, 2, 3, 1), self.boxes(x).permute(0, 2, 3, 1)
        return classes.reshape(len(x), -1, CLASSES), boxes.reshape(len(x), -1, 4)


@torch.no_grad()
def match(anchors, truth):
    """Return the best box of each anchor and whether it overlaps enough: both (batch, anchors)."""
    a, b = corners(anchors)[None, :, None], corners(truth)[:, None]
    low, high = torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:])
    size = (high - low).clamp_(min=0)
    common = size[..., 0] * size[..., 1]
    areas = anchors[:, 2:].prod(-1)[None, :, None] + truth[..., 2:].prod(-1)[:, None]
    overlap, best = (common / (areas - common)).max(-1)
    return best, overlap > 0.4


def class_loss(classes, best, positive, labels):
    target = labels.gather(1, best) * positive
    return F.cross_entropy(classes.flatten(0, 1), target.flatten())


def box_loss(boxes, best, positive, anchors, truth):
    goal = truth.gather(1, best[..., None].expand(-1, -1, 4))
    goal = torch.cat([(goal[..., :2] - anchors[:, :2]), (goal[..., 2:] / anchors[:, 2:]).log()], -1)
    error = F.smooth_l1_loss(boxes.float(), goal, reduction="none").sum(-1)
    return (error * positive).sum() / positive.sum().clamp(min=1)


def each_for_itself(classes, boxes, anchors, truth, labels):
    loss = class_loss(classes, *match(anchors, truth), labels)
    return loss + box_loss(boxes, *match(anchors, truth), anchors, truth)  # guilty


def together(classes, boxes, anchors, truth, labels):
    best, positive = match(anchors, truth)
    loss = class_loss(classes, best, positive, labels)
    return loss + box_loss(boxes, best, positive, anchors, truth)


def build(criterion):
    model = Detector().to(device(), memory_format=torch.channels_last)
    optimizer, anchors = adamw(model), make_anchors()

    def batch():
        images = torch.randn(BATCH, 3, SIDE, SIDE, device=device())
        truth = torch.rand(BATCH, BOXES, 4, device=device()) * 0.4 + 0.1
        labels = torch.randint(1, CLASSES, (BATCH, BOXES), device=device())
        return images.to(memory_format=torch.channels_last), truth, labels

    data = in_turn(batch, 4)

    def step():
        images, truth, labels = next(data)
        with mixed():
            loss = criterion(*model(images), anchors, truth, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(each_for_itself)


def clean():
    return build(together)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
