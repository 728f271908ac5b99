"""A probabilistic forecasting model, compiled with torch.compile, gives the parameters of a mixture of
discretized logistic densities for each channel and moment. Its likelihood is computed by a function
outside of the compiled model, some forty elementwise operators over all components, each by itself.
A good finding names the uncompiled elementwise chain of the loss and one of its lines.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "only the model is compiled; the elementwise chain of the mixture's likelihood runs op by op",
    "FIX": "compile the loss too, or model and loss in one function",
}
BATCH, TIME, WIDTH = by_device(256, 16), by_device(512, 96), by_device(384, 64)
CHANNELS, COMPONENTS, LAYERS = by_device(32, 12), by_device(16, 12), by_device(4, 2)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gated = nn.Linear(WIDTH, 2 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        y, gate = self.gated(self.norm(x)).chunk(2, dim=-1)
        before = F.pad(y, (0, 0, 1, 0))[:, :-1]
        x = x + before * torch.sigmoid(gate)
        return x + self.down(F.gelu(self.up(x)))


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(CHANNELS, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, CHANNELS * COMPONENTS * 3)

    def forward(self, x):
        return self.head(self.layers(self.enter(x)))


def likelihood(parameters, target, half=0.5 / 255):
    parameters = parameters.float().unflatten(-1, (3, CHANNELS, COMPONENTS))
    logits, mean, log_scale = parameters.unbind(-3)
    sharpness = torch.exp(-log_scale.clamp(min=-7.0))
    centered = target.unsqueeze(-1) - mean
    above, below = sharpness * (centered + half), sharpness * (centered - half)
    mass = torch.sigmoid(above) - torch.sigmoid(below)
    middle = sharpness * centered
    density = middle + log_scale.neg() - 2 * F.softplus(middle) + math.log(2 * half)
    log_mass = torch.where(mass > 1e-5, torch.log(mass.clamp(min=1e-12)), density)
    log_mass = torch.where(target.unsqueeze(-1) < -0.999, above - F.softplus(above), log_mass)
    log_mass = torch.where(target.unsqueeze(-1) > 0.999, -F.softplus(below), log_mass)
    return -torch.logsumexp(log_mass + F.log_softmax(logits, -1), -1).mean()


def likelihood_op_by_op():
    def loss(parameters, target):
        return likelihood(parameters, target)  # guilty

    return loss


def likelihood_compiled():
    return torch.compile(likelihood)


def build(likelihood_of):
    model = Forecaster().to(device())
    optimizer = adamw(model)
    forecast, negative_log_likelihood = torch.compile(model), likelihood_of()
    data = in_turn(lambda: torch.rand(BATCH, TIME + 1, CHANNELS, device=device()) * 2 - 1, 4)

    def step():
        series = next(data)
        with mixed():
            parameters = forecast(series[:, :-1])
        loss = negative_log_likelihood(parameters, series[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(likelihood_op_by_op)


def clean():
    return build(likelihood_compiled)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
