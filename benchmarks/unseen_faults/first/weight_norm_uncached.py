"""One block with normalized weights, applied many times (as in ALBERT or a deep equilibrium model)."""

import contextlib

import steplab
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from common import adamw, device, my_turn, pick

FAULT = {
    "NAME": "weight_norm_uncached",
    "CAUSE": "The weights are parametrized by weight_norm, which normalizes the whole matrix again at every one of the block's many uses in a step.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Run the forward inside torch.nn.utils.parametrize.cached(), which computes each weight once.",
    "STYLE": "factory",
    "BATCH": 4,
}
WIDTH, USES, CONTEXT = pick(2048, 32), pick(12, 3), pick(512, 8)


class Shared(nn.Module):
    def __init__(self, cached):
        super().__init__()
        self.cached = cached
        self.norm = nn.LayerNorm(WIDTH)
        self.up = weight_norm(nn.Linear(WIDTH, 4 * WIDTH))
        self.down = weight_norm(nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        with parametrize.cached() if self.cached else contextlib.nullcontext():
            for _ in range(USES):
                x = x + self.down(F.gelu(self.up(self.norm(x))))  # FAULT
        return x


def batches(size):
    ready = [torch.randn(size, CONTEXT, WIDTH, device=device()) for _ in range(2)]
    while True:
        yield from ready


def loss(model, x):
    with torch.autocast(x.device.type, torch.bfloat16):
        return F.mse_loss(model(x[:, :-1]).float(), x[:, 1:])


def make(cached):
    model = Shared(cached)
    my_turn()
    return steplab.UserModel(
        model=model, batches=batches, loss=loss, optimizer=adamw, tokens_per_sequence=CONTEXT
    )


def faulty():
    return make(cached=False)


def clean():
    return make(cached=True)
