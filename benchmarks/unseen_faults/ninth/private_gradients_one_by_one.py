"""Differentially private SGD clips the gradient of each sample. The gradients are made with one
forward and backward per sample in a Python loop, where torch.func.vmap computes them for the batch.
A good finding names the forward and backward of single samples (or their loop), and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

from common import adamw, by_device, device, in_turn, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "gradients of single samples are computed by one forward and backward per sample in a Python loop",
    "FIX": "compute them for the whole batch with vmap of torch.func.grad",
}
BATCH, FEATURES, WIDTH, CLASSES = by_device(256, 256), 64, by_device(512, 160), 10
CLIP = 1.0


def prepare(gradients):
    model = nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, CLASSES),
    ).to(device())
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, FEATURES, device=device()),
            torch.randint(CLASSES, (BATCH,), device=device()),
        )
    )

    def step():
        x, y = next(data)
        loss = gradients(model, x, y)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def one_by_one(model, x, y):
    params, total = list(model.parameters()), 0
    sums = [torch.zeros_like(p) for p in params]
    for i in range(len(x)):
        loss = F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        grads = torch.autograd.grad(loss, params)  # guilty
        norm = torch.nn.utils.get_total_norm(grads)
        torch._foreach_add_(sums, torch._foreach_mul(grads, (CLIP / norm).clamp(max=1)))
        total = total + loss.detach()
    for p, s in zip(params, sums, strict=True):
        p.grad = s / len(x)
    return total / len(x)


def all_at_once(model, x, y):
    def loss_of(weights, row, label):
        return F.cross_entropy(functional_call(model, weights, row[None]), label[None])

    weights = {name: p.detach() for name, p in model.named_parameters()}
    grads, losses = vmap(grad_and_value(loss_of), (None, 0, 0))(weights, x, y)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
    factors = (CLIP / norms).clamp(max=1) / len(x)
    for name, p in model.named_parameters():
        p.grad = (factors @ grads[name].flatten(1)).view_as(p)
    return losses.mean()


def faulty():
    return prepare(one_by_one)


def clean():
    return prepare(all_at_once)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
