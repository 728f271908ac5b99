"""A compiled loss also returns all its intermediate tensors for a debug panel that is off, so none
of them can stay inside a fused kernel: each is written to memory in full.
A good finding names the large outputs of the compiled graph that nobody reads, and the line that
calls (or returns) them.
"""

import torch
from torch import nn

from common import by_device, device, in_turn, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the compiled function returns its intermediate tensors, which therefore must be written to memory, and the caller drops them",
    "FIX": "return the loss alone",
}
PIXELS, FEATURES = by_device(8_388_608, 524_288), 8


def mixture_loss(weights, means, scales, target):
    offset = (target - means) * torch.exp(-scales)
    log_parts = torch.log_softmax(weights, -1) - scales - 0.5 * offset.square()
    likelihood = torch.logsumexp(log_parts, -1)
    share = torch.softmax(log_parts, -1)
    entropy = -(share * log_parts).sum(-1)
    loss = -likelihood.mean() + 0.01 * entropy.mean()
    return loss, {
        "offset": offset,
        "log_parts": log_parts,
        "density": log_parts.exp(),
        "distance": offset.square(),
        "share": share,
        "likelihood": likelihood,
        "entropy": entropy,
    }


def loss_only(weights, means, scales, target):
    return mixture_loss(weights, means, scales, target)[0]


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights, self.means, self.scales = (
            nn.Parameter(torch.linspace(-1, 1, FEATURES)) for _ in range(3)
        )

    def forward(self):
        return self.weights, self.means, self.scales


def prepare():
    model = Parts().to(device())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    data = in_turn(lambda: torch.randn(PIXELS, 1, device=device()), 2)
    return model, optimizer, data


def faulty():
    model, optimizer, data = prepare()
    compiled = torch.compile(mixture_loss)
    debug = False

    def step():
        optimizer.zero_grad()
        loss, panel = compiled(*model(), next(data))  # guilty
        if debug:
            print({name: t.mean().item() for name, t in panel.items()})
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def clean():
    model, optimizer, data = prepare()
    compiled = torch.compile(loss_only)

    def step():
        optimizer.zero_grad()
        loss = compiled(*model(), next(data))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
