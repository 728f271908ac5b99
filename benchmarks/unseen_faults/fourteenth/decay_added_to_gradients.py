"""A network predicts the toxicity of molecules from their fingerprints. The weight decay is written in
the loop: between backward and update, each weight is scaled, in a copy, and added to its gradient,
one weight after the other. The fused SGD reads every weight and every gradient anyway and adds the
decay on its way.
A good finding names the weight decay by hand (extra passes over all weights) and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "a Python loop adds a scaled copy of each weight to its gradient before the update",
    "FIX": "weight_decay of SGD, which does it within the fused update",
}
BATCH, BITS = by_device(512, 16), by_device(8192, 2048)
WIDTH, LAYERS, ASSAYS, DECAY = by_device(16_384, 1024), by_device(4, 3), 12, 1e-4


class Toxicity(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = [BITS] + LAYERS * [WIDTH]
        self.layers = nn.ModuleList(map(nn.Linear, sizes[:-1], sizes[1:]))
        self.head = nn.Linear(WIDTH, ASSAYS)

    def forward(self, x):
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(x)


def add_decay(weights):
    with torch.no_grad():
        for weight in weights:
            weight.grad += DECAY * weight  # guilty


def build(by_hand):
    model = Toxicity().to(device())
    weights = list(model.parameters())
    how = {"momentum": 0.9, "weight_decay": 0.0 if by_hand else DECAY}
    optimizer = torch.optim.SGD(weights, lr=0.01, fused=True, **how)
    data = in_turn(
        lambda: (
            (torch.rand(BATCH, BITS, device=device()) < 0.1).float(),
            (torch.rand(BATCH, ASSAYS, device=device()) < 0.3).float(),
        )
    )

    def step():
        fingerprints, toxic = next(data)
        with mixed():
            logits = model(fingerprints)
            loss = F.binary_cross_entropy_with_logits(logits, toxic)
        loss.backward()
        if by_hand:
            add_decay(weights)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(by_hand=True)


def clean():
    return build(by_hand=False)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
