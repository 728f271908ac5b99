"""The likelihood of a vocoder is compiled, but the step still runs under the compiler stance
"force_eager", set once to step through the loss in a debugger: none of it is compiled.
A good finding names the chain of eager elementwise operators of the loss, that the compiled
function does not run compiled, and the line of the stance.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the stance force_eager, left from debugging, makes the compiled loss run eagerly",
    "FIX": "remove torch.compiler.set_stance",
}
BATCH, TIME, WIDTH, MIX = by_device(64, 8), by_device(16_384, 2048), by_device(128, 16), 20


class Vocoder(nn.Module):
    """Dilated causal convolutions that predict a mixture of logistics for every sample."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(1, WIDTH, 1)
        self.layers = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 2, dilation=2**i) for i in range(4))
        self.last = nn.Conv1d(WIDTH, 3 * MIX, 1)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x[..., layer.dilation[0] :] + torch.relu(layer(x))
        return self.last(x)


def likelihood(out, y):
    """Negative log-likelihood of 16-bit samples under a mixture of discretized logistics."""
    weight, mean, scale = out.float().chunk(3, dim=1)
    scale = scale.clamp(min=-7.0)
    centered, inverse = y - mean, torch.exp(-scale)
    plus, minus = inverse * (centered + 1 / 65535), inverse * (centered - 1 / 65535)
    inside = torch.sigmoid(plus) - torch.sigmoid(minus)
    middle = inverse * centered
    density = middle - scale - 2.0 * F.softplus(middle) - 10.4
    edge = torch.where(y > 0.999, -F.softplus(minus), torch.log(inside.clamp(min=1e-12)))
    edge = torch.where(y < -0.999, plus - F.softplus(plus), edge)
    logp = torch.where(inside > 1e-5, edge, density)
    return -torch.logsumexp(logp + F.log_softmax(weight, dim=1), dim=1).mean()


def prepare():
    model = Vocoder().to(device())
    data = in_turn(lambda: torch.rand(BATCH, 1, TIME + 16, device=device()) * 2 - 1)
    return model, adamw(model), torch.compile(likelihood), data


def train(model, optimizer, criterion, sound):
    loss = criterion(model(sound[..., :-1]), sound[..., 16:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, optimizer, criterion, data = prepare()

    def step():
        with torch.compiler.set_stance("force_eager"):  # guilty
            return train(model, optimizer, criterion, next(data))

    return step


def clean():
    model, optimizer, criterion, data = prepare()

    def step():
        return train(model, optimizer, criterion, next(data))

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
