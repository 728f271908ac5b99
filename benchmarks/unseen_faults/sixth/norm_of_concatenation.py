"""Gradients are clipped by hand: all of them are copied into one long vector, and its norm is taken.
A good finding names the copy of all gradients, and the line that concatenates them.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "all gradients are concatenated into one vector in every step to take its norm",
    "FIX": "clip_grad_norm_, which takes the norm of the tensors' norms",
}
BATCH, FEATURES, WIDTH, LAYERS, CLASSES = by_device(64, 16), 64, by_device(8192, 1536), 6, 100
LIMIT = 1.0


def prepare():
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
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), data


def forward_backward(model, x, y):
    with mixed():
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss.detach()


def faulty():
    model, optimizer, data = prepare()

    def step():
        loss = forward_backward(model, *next(data))
        grads = [p.grad for p in model.parameters()]
        norm = torch.cat([g.flatten() for g in grads]).norm()  # guilty
        torch._foreach_mul_(grads, (LIMIT / (norm + 1e-6)).clamp(max=1.0))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def clean():
    model, optimizer, data = prepare()

    def step():
        loss = forward_backward(model, *next(data))
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
