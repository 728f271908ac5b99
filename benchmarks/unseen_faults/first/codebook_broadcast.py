"""Vector quantization: every state takes the nearest code of a codebook."""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, device, my_turn, pick

FAULT = {
    "NAME": "codebook_broadcast",
    "CAUSE": "Distances to the codebook are computed by broadcasting the difference of every state and every code, a tensor of states x codes x width that takes gigabytes.",
    "LINE": "# FAULT",
    "KIND": "memory",
    "FIX": "Expand the square: |x|^2 - 2 x.c + |c|^2, which is one matrix product (or torch.cdist).",
    "STYLE": "factory",
    "BATCH": 8,
}
WIDTH, CODE, CODES, CONTEXT, LAYERS = (
    pick(2048, 16),
    pick(64, 8),
    pick(2048, 32),
    pick(1024, 8),
    pick(3, 1),
)


def distances_by_broadcast(states, codes):
    return (states[:, None, :] - codes[None, :, :]).pow(2).sum(-1)  # FAULT


def distances_by_product(states, codes):
    return states.square().sum(-1, keepdim=True) - 2 * states @ codes.T + codes.square().sum(-1)


def feed_forward():
    return nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
    )


class Quantizer(nn.Module):
    def __init__(self, distances):
        super().__init__()
        self.distances = distances
        self.encoder = nn.Sequential(
            *[feed_forward() for _ in range(LAYERS)], nn.Linear(WIDTH, CODE)
        )
        self.codes = nn.Parameter(torch.randn(CODES, CODE))
        self.decoder = nn.Sequential(
            nn.Linear(CODE, WIDTH), *[feed_forward() for _ in range(LAYERS)]
        )

    def forward(self, x):
        states = self.encoder(x).flatten(0, 1).float()
        nearest = self.distances(states, self.codes).argmin(-1)
        chosen = self.codes[nearest]
        straight = states + (chosen - states).detach()
        return self.decoder(straight).view_as(x), F.mse_loss(chosen, states.detach()) + F.mse_loss(
            states, chosen.detach()
        )


def batches(size):
    ready = [torch.randn(size, CONTEXT, WIDTH, device=device()) for _ in range(2)]
    while True:
        yield from ready


def loss(model, x):
    with torch.autocast(x.device.type, torch.bfloat16):
        out, commitment = model(x)
    return F.mse_loss(out.float(), x) + 0.25 * commitment


def make(distances):
    model = Quantizer(distances)
    my_turn()
    return steplab.UserModel(
        model=model, batches=batches, loss=loss, optimizer=adamw, tokens_per_sequence=CONTEXT
    )


def faulty():
    return make(distances_by_broadcast)


def clean():
    return make(distances_by_product)
