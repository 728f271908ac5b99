"""Weight decay is done by hand before every update, with new memory for every weight, although the
optimizer would do it in the same pass as its update.
A good finding names the elementwise work over all weights outside the optimizer, and that line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "weight decay is done by hand, with two more passes and new memory for every weight",
    "FIX": "the weight_decay of AdamW, which its fused update does on the way",
}
BATCH, FEATURES, WIDTH, LAYERS, CLASSES = by_device(64, 16), 64, by_device(8192, 1536), 6, 100
RATE, DECAY = 1e-4, 0.1


def prepare(decay):
    layers = [nn.Linear(FEATURES, WIDTH)]
    for _ in range(LAYERS - 2):
        layers += [nn.ReLU(), nn.Linear(WIDTH, WIDTH)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.Linear(WIDTH, CLASSES)).to(device())
    data = in_turn(
        lambda: (
            torch.randn(BATCH, FEATURES, device=device()),
            torch.randint(CLASSES, (BATCH,), device=device()),
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=decay, fused=True)
    return model, optimizer, data


def forward_backward(model, x, y):
    with mixed():
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss.detach()


def faulty():
    model, optimizer, data = prepare(0.0)

    def step():
        loss = forward_backward(model, *next(data))
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(p - RATE * DECAY * p)  # guilty
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def clean():
    model, optimizer, data = prepare(DECAY)

    def step():
        loss = forward_backward(model, *next(data))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
