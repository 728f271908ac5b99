"""A hand-written activation keeps its output for the backward as an attribute of ctx instead of with
save_for_backward. The output refers to its node of the graph and the node to the output: a cycle
that the end of the backward does not free, so memory grows from step to step.
A good finding names the growth of memory, or the outputs that stay, and the line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "memory",
    "STYLE": "factory",
    "BATCH": 64,
    "CPU_BATCH": 8,
    "CAUSE": "an autograd.Function keeps its own output as an attribute of ctx, a cycle that keeps it alive after the step",
    "FIX": "ctx.save_for_backward(out)",
}
SIZE, WIDTH = by_device(128, 32), by_device(128, 32)


class OnCtx(torch.autograd.Function):
    """Softsign, whose gradient follows from the output."""

    @staticmethod
    def forward(ctx, x):
        out = x / (1 + x.abs())
        ctx.out = out  # guilty
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 - ctx.out.abs()).square()


class Saved(torch.autograd.Function):
    """Softsign, whose gradient follows from the output."""

    @staticmethod
    def forward(ctx, x):
        out = x / (1 + x.abs())
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        return grad * (1 - out.abs()).square()


class Autoencoder(nn.Module):
    def __init__(self, softsign):
        super().__init__()
        self.softsign = softsign.apply
        self.enter = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(3))
        self.leave = nn.Conv2d(WIDTH, 3, 1)

    def forward(self, x):
        h = self.enter(x)
        for conv in self.convs:
            h = h + self.softsign(conv(h))
        return self.leave(h)


def build(softsign):
    my_turn()

    def batches(size):
        return in_turn(lambda: torch.randn(size, 3, SIZE, SIZE, device=device()))

    def loss(model, x):
        with mixed():
            return F.mse_loss(model(x), x)

    return steplab.UserModel(Autoencoder(softsign), batches, loss, unit="images")


def faulty():
    return build(OnCtx)


def clean():
    return build(Saved)
