"""After a run that ended in NaN, somebody added an assertion that all gradients and all weights are
finite, for every tensor and in every step.
A good finding names the checks as work on all weights and gradients, and on a GPU the waits for
their answers, and the line of one of them.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "every gradient and every weight is searched for values that are not finite, in every step",
    "FIX": "look at the norm that clip_grad_norm_ returns anyway, every few hundred steps",
}
BATCH, FEATURES, WIDTH, LAYERS = (
    by_device(4096, 64),
    by_device(512, 64),
    by_device(2048, 512),
    by_device(12, 8),
)
EVERY = 500


def prepare():
    layers = [nn.Linear(FEATURES, WIDTH), nn.GELU()]
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1)).to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    rows = in_turn(
        lambda: (
            torch.randn(BATCH, FEATURES, device=device()),
            torch.randn(BATCH, 1, device=device()),
        )
    )
    return model, optimizer, rows


def forward_backward(model, x, y):
    with mixed():
        loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def faulty():
    model, optimizer, rows = prepare()

    def step():
        loss, _ = forward_backward(model, *next(rows))
        for p in model.parameters():
            assert torch.isfinite(p.grad).all()  # guilty
        optimizer.step()
        for p in model.parameters():
            assert torch.isfinite(p).all()
        optimizer.zero_grad()
        return loss

    return step


def clean():
    model, optimizer, rows = prepare()
    done = 0

    def step():
        nonlocal done
        loss, norm = forward_backward(model, *next(rows))
        done += 1
        if done % EVERY == 0:
            assert norm.isfinite()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
