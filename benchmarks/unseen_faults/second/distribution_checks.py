"""A ladder of latent variables: a hierarchical variational autoencoder over feature vectors."""

import steplab
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal, kl_divergence

from common import adamw, device, my_turn, pick

FAULT = {
    "NAME": "distribution_checks",
    "CAUSE": "torch.distributions checks its arguments by default: every Normal asks the device twice whether all values are valid, and the host waits for the answer.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Normal(mean, scale, validate_args=False), or Distribution.set_default_validate_args(False) once.",
    "STYLE": "factory",
    "BATCH": 8192,
    "WHY": "The validation inside torch.distributions reads a boolean back from the device, four times per level and 32 times per forward; each stops the launches until the device has caught up.",
    "GAIN_MS": None,
}
WIDTH, LATENT, LEVELS, FEATURES = pick(2048, 16), pick(256, 4), pick(8, 2), pick(1024, 8)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Level(nn.Module):
    def __init__(self, checks):
        super().__init__()
        self.bottom_up, self.top_down, self.checks = Mlp(), Mlp(), checks
        self.prior, self.posterior = nn.Linear(WIDTH, 2 * LATENT), nn.Linear(WIDTH, 2 * LATENT)
        self.inject = nn.Linear(LATENT, WIDTH)

    def normal(self, parameters):
        mean, raw = parameters.float().chunk(2, -1)
        scale = F.softplus(raw) + 1e-3
        if self.checks:
            return Normal(mean, scale)  # FAULT
        return Normal(mean, scale, validate_args=False)

    def forward(self, state, evidence):
        prior = self.normal(self.prior(state))
        posterior = self.normal(self.posterior(state + evidence))
        state = self.top_down(state + self.inject(posterior.rsample()))
        return state, kl_divergence(posterior, prior).sum(-1).mean()


class Ladder(nn.Module):
    def __init__(self, checks):
        super().__init__()
        self.inward, self.outward = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, FEATURES)
        self.start = nn.Parameter(torch.zeros(WIDTH))
        self.levels = nn.ModuleList(Level(checks) for _ in range(LEVELS))

    def forward(self, x):
        evidence, up = [], self.inward(x)
        for level in self.levels:
            up = level.bottom_up(up)
            evidence.append(up)
        state, divergence = self.start.expand_as(up), 0
        for level, seen in zip(reversed(self.levels), reversed(evidence), strict=True):
            state, part = level(state, seen)
            divergence = divergence + part
        return self.outward(state), divergence


def batches(size):
    ready = [torch.randn(size, FEATURES, device=device()) for _ in range(4)]
    while True:
        yield from ready


def loss(model, x):
    with torch.autocast(x.device.type, torch.bfloat16):
        rebuilt, divergence = model(x)
    return F.mse_loss(rebuilt.float(), x) + 1e-3 * divergence


def make(checks):
    torch.manual_seed(0)
    model = Ladder(checks)
    my_turn()
    return steplab.UserModel(model=model, batches=batches, loss=loss, optimizer=adamw)


def faulty():
    return make(checks=True)


def clean():
    return make(checks=False)
