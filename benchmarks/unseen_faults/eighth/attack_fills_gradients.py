"""Adversarial training: three steps of an attack look for a worse image before every update. The
attack calls loss.backward(), which also computes the gradients of all weights, although it needs
the gradient of the image alone; zero_grad throws them away.
A good finding names the weights' gradients that nobody uses, and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the attack's backward computes the gradients of all weights, which are cleared unread",
    "FIX": "torch.autograd.grad of the loss with respect to the perturbation alone",
}
BATCH, SIZE, CLASSES = by_device(128, 32), by_device(32, 16), 10
WIDTH, LAYERS = by_device(256, 32), by_device(6, 2)
EPS, ALPHA, STEPS = 8 / 255, 3 / 255, 3


def build():
    layers = [nn.Conv2d(3, WIDTH, 3, padding=1)]
    for _ in range(LAYERS):
        layers += [nn.BatchNorm2d(WIDTH), nn.ReLU(), nn.Conv2d(WIDTH, WIDTH, 3, padding=1)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, CLASSES)]
    return nn.Sequential(*layers).to(device(), memory_format=torch.channels_last)


def batch():
    x = torch.rand(BATCH, 3, SIZE, SIZE, device=device())
    y = torch.randint(CLASSES, (BATCH,), device=device())
    return x.to(memory_format=torch.channels_last), y


def objective(model, x, y):
    with mixed():
        return F.cross_entropy(model(x), y)


def moved(delta, slope):
    """Go one step uphill and stay near the image."""
    return (delta + ALPHA * slope.sign()).clamp(-EPS, EPS)


def train(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = objective(model, x, y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def faulty():
    model, data = build(), in_turn(batch)
    optimizer = adamw(model)

    def step():
        x, y = next(data)
        delta = torch.zeros_like(x)
        for _ in range(STEPS):
            delta = delta.detach().requires_grad_()
            loss = objective(model, x + delta, y)
            loss.backward()  # guilty
            delta = moved(delta.detach(), delta.grad)
        return train(model, optimizer, x + delta, y)

    return step


def clean():
    model, data = build(), in_turn(batch)
    optimizer = adamw(model)

    def step():
        x, y = next(data)
        delta = torch.zeros_like(x)
        for _ in range(STEPS):
            delta = delta.detach().requires_grad_()
            loss = objective(model, x + delta, y)
            (slope,) = torch.autograd.grad(loss, delta)
            delta = moved(delta.detach(), slope)
        return train(model, optimizer, x + delta, y)

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
