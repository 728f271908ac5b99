"""A new head on a pretrained backbone that is not to be trained. Own loop."""

import torch
import torch.nn.functional as F
from torch import nn

from common import Decoder, device, main, pick

FAULT = {
    "NAME": "frozen_backbone",
    "CAUSE": "Only the head is given to the optimizer, but the backbone's parameters still require gradients, so the backward pass of the whole backbone is computed and never used.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "backbone.requires_grad_(False), or run it under torch.no_grad().",
    "STYLE": "loop",
}
BATCH, WIDTH, LAYERS, VOCAB, CONTEXT = (
    pick(16, 2),
    pick(1024, 32),
    pick(8, 2),
    pick(8192, 64),
    pick(1024, 16),
)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT)
        self.backbone.head = nn.Identity()
        self.head = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, 16))

    def forward(self, ids):
        return self.head(self.backbone.hidden(ids)).mean(dim=1)


def make(freeze):
    dev = device()
    model = Classifier().to(dev)
    if freeze:
        model.backbone.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=1e-3, fused=True)  # FAULT
    ids = torch.randint(VOCAB, (4, BATCH, CONTEXT), device=dev)
    labels = torch.randint(16, (4, BATCH), device=dev)
    count = 0

    def step():
        nonlocal count
        with torch.autocast(dev, torch.bfloat16):
            loss = F.cross_entropy(model(ids[count % 4]), labels[count % 4])
        count += 1
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main(faulty=lambda: make(False), clean=lambda: make(True))
