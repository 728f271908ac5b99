"""A one-stage detector is trained on padded box lists. To assign boxes to anchors, a Python loop over
the images and over each image's boxes computes the overlaps of one box with all anchors at a time:
hundreds of small operations, because the formula was first written for one box.
A good finding names the Python loop over images and boxes in the matching (many tiny operations that
one broadcast would do), and a line in the loop's body.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "anchors are matched by a Python loop over images and boxes",
    "FIX": "compute the overlaps of all boxes with all anchors by one broadcast, and take the maximum",
}
BATCH, BOXES, CLASSES = by_device(64, 16), by_device(40, 12), by_device(80, 20)
SIDE, WIDTH, SHAPES = by_device(512, 96), by_device(64, 16), 6
CELLS = SIDE // 16


def make_anchors():
    centers = (torch.arange(CELLS) + 0.5) / CELLS
    y, x = torch.meshgrid(centers, centers, indexing="ij")
    sizes = torch.tensor([[0.1, 0.1], [0.2, 0.2], [0.4, 0.4], [0.2, 0.4], [0.4, 0.2], [0.6, 0.6]])
    middle = torch.stack([x, y], -1).view(-1, 1, 2)
    corners = torch.cat([middle - sizes / 2, middle + sizes / 2], -1)
    return corners.view(-1, 4).to(device())


def overlap(anchors, boxes):
    sides = torch.minimum(anchors[..., 2:], boxes[..., 2:]) - torch.maximum(
        anchors[..., :2], boxes[..., :2]
    )
    shared = sides.clamp(min=0).prod(-1)
    areas = (anchors[..., 2:] - anchors[..., :2]).prod(-1) + (boxes[..., 2:] - boxes[..., :2]).prod(
        -1
    )
    return shared / (areas - shared)


def match_one_by_one(anchors, boxes):
    best = torch.zeros(len(boxes), len(anchors), device=boxes.device)
    index = torch.zeros(len(boxes), len(anchors), dtype=torch.long, device=boxes.device)
    for i in range(len(boxes)):
        for j in range(boxes.shape[1]):
            found = overlap(anchors, boxes[i, j])  # guilty
            index[i] = torch.where(found > best[i], j, index[i])
            best[i] = torch.maximum(found, best[i])
    return best, index


def match_all(anchors, boxes):
    return overlap(anchors[None, :, None], boxes[:, None]).max(-1)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [3, WIDTH, 2 * WIDTH, 4 * WIDTH, 4 * WIDTH]
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, 3, 2, 1) for a, b in zip(widths, widths[1:], strict=False)
        )
        self.neck = nn.Conv2d(4 * WIDTH, 4 * WIDTH, 3, padding=1)
        self.head = nn.Conv2d(4 * WIDTH, SHAPES * (CLASSES + 1 + 4), 1)

    def forward(self, x):
        for conv in self.convs:
            x = F.relu(conv(x))
        y = self.head(F.relu(self.neck(x))).permute(0, 2, 3, 1)
        return y.reshape(len(y), -1, CLASSES + 1 + 4).split([CLASSES + 1, 4], -1)


def make_batch():
    corner = torch.rand(BATCH, BOXES, 2, device=device()) * 0.6
    size = torch.rand(BATCH, BOXES, 2, device=device()) * 0.35 + 0.05
    boxes = torch.cat([corner, corner + size], -1)
    count = torch.randint(BOXES // 2, BOXES + 1, (BATCH, 1), device=device())
    boxes = boxes * (torch.arange(BOXES, device=device()) < count)[..., None]
    labels = torch.randint(1, CLASSES + 1, (BATCH, BOXES), device=device())
    return torch.rand(BATCH, 3, SIDE, SIDE, device=device()), boxes, labels


def build(match):
    model, anchors = Detector().to(device()), make_anchors()
    optimizer = adamw(model)
    data = in_turn(make_batch)

    def step():
        images, boxes, labels = next(data)
        best, index = match(anchors, boxes)
        hit = best > 0.4
        wanted = labels.gather(1, index) * hit
        places = boxes.gather(1, index[..., None].expand(-1, -1, 4)) - anchors
        with mixed():
            scores, shifts = model(images)
            loss = F.cross_entropy(scores.flatten(0, 1), wanted.flatten())
        distance = F.smooth_l1_loss(shifts.float(), places, reduction="none").sum(-1)
        loss = loss + (distance * hit).sum() / hit.sum().clamp(min=1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(match_one_by_one)


def clean():
    return build(match_all)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
