"""A detector with queries is trained with one-to-many matching: each object takes the five queries
that suit it best. As in DETR, all predictions and all objects of a batch are laid out in one matrix
of costs, of which only the blocks on the diagonal are used, where both are of the same image.
A good finding names the cost of pairs from different images, which is thrown away, and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the matching cost is computed for all predictions and objects of the batch, across images",
    "FIX": "compute the cost per image in batched form: (image, query, object)",
}
BATCH, SIDE, WIDTH = by_device(16, 10), by_device(512, 64), by_device(256, 64)
QUERIES, OBJECTS, CLASSES = by_device(900, 120), by_device(100, 20), by_device(365, 20)
LAYERS, TAKEN = by_device(6, 3), 5


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.cross = nn.MultiheadAttention(WIDTH, WIDTH // 32, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, memory):
        x = x + self.cross(self.norm1(x), memory, memory, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 8, stride=8)
        self.queries = nn.Parameter(torch.randn(QUERIES, WIDTH))
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, CLASSES + 4)

    def forward(self, images):
        memory = F.gelu(self.stem(images)).flatten(2).transpose(1, 2)
        x = self.queries.expand(len(images), -1, -1)
        for layer in self.layers:
            x = layer(x, memory)
        logits, boxes = self.head(x).float().split([CLASSES, 4], -1)
        return logits, boxes.sigmoid()


def corners(boxes):
    middle, size = boxes.split(2, -1)
    return torch.cat((middle - size / 2, middle + size / 2), -1)


def generalized_iou(a, b):
    a, b = corners(a)[..., :, None, :], corners(b)[..., None, :, :]
    shared = (torch.min(a[..., 2:], b[..., 2:]) - torch.max(a[..., :2], b[..., :2])).clamp(min=0)
    hull = torch.max(a[..., 2:], b[..., 2:]) - torch.min(a[..., :2], b[..., :2])
    overlap, hull = shared.prod(-1), hull.prod(-1)
    union = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1) - overlap
    return overlap / union - (hull - union) / hull


def cost_of_batch(scores, boxes, labels, targets):
    flat, wanted = boxes.flatten(0, 1), targets.flatten(0, 1)
    cost = 5 * torch.cdist(flat, wanted, p=1) - scores.flatten(0, 1)[:, labels.flatten()]
    cost = cost - 2 * generalized_iou(flat, wanted)  # guilty
    return cost.view(BATCH, QUERIES, BATCH, OBJECTS).diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def cost_of_images(scores, boxes, labels, targets):
    score = scores.gather(2, labels[:, None].expand(-1, QUERIES, -1))
    cost = 5 * torch.cdist(boxes, targets, p=1) - score
    return cost - 2 * generalized_iou(boxes, targets)


def build(cost_of):
    model = Detector().to(device())
    optimizer = adamw(model)

    def make():
        targets = torch.rand(BATCH, OBJECTS, 4, device=device()) * 0.4 + 0.1
        labels = torch.randint(CLASSES, (BATCH, OBJECTS), device=device())
        return torch.randn(BATCH, 3, SIDE, SIDE, device=device()), labels, targets

    data = in_turn(make)

    def step():
        images, labels, targets = next(data)
        with mixed():
            logits, boxes = model(images)
        with torch.no_grad():
            cost = cost_of(logits.sigmoid(), boxes, labels, targets)
            chosen = cost.topk(TAKEN, dim=1, largest=False).indices.flatten(1)
        wanted = torch.zeros_like(logits)
        row = torch.arange(BATCH, device=logits.device)[:, None]
        wanted[row, chosen, labels.repeat(1, TAKEN)] = 1.0
        loss = F.binary_cross_entropy_with_logits(logits, wanted)
        loss = loss + F.l1_loss(boxes[row, chosen], targets.repeat(1, TAKEN, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def faulty():
    return build(cost_of_batch)


def clean():
    return build(cost_of_images)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
