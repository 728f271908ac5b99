"""A model of electricity prices mixes each moment with the one before it, channel by channel, which is
a long chain of small elementwise operations; that is why it is compiled. On the day when a gradient
was wrong, the backend was set to "aot_eager" to rule Inductor out. It never was set back: the
model is traced, and then runs operator by operator.
A good finding names the compilation without Inductor (elementwise chains not fused) and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": 'torch.compile has the debugging backend "aot_eager", which fuses nothing',
    "FIX": "compile with the default backend, Inductor",
}
BATCH, TIME, SERIES = by_device(64, 48), by_device(1024, 96), 24
WIDTH, LAYERS, HORIZON = by_device(512, 48), by_device(8, 3), 24


class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.mix_key = nn.Parameter(torch.rand(WIDTH))
        self.mix_gate = nn.Parameter(torch.rand(WIDTH))
        self.key = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        now = self.norm(x)
        change = F.pad(now, (0, 0, 1, -1)) - now
        key = self.key(now + change * self.mix_key)
        gate = self.gate(now + change * self.mix_gate)
        strength = F.relu(key).square()
        strength = strength / (1.0 + strength)
        return x + torch.sigmoid(gate) * torch.tanh(self.value(strength))


class Prices(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Linear(SERIES, WIDTH)
        self.layers = nn.Sequential(*(Shift() for _ in range(LAYERS)))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, HORIZON)

    def forward(self, past):
        return self.head(self.norm(self.layers(self.start(past))))


def build(backend):
    model = Prices().to(device())
    optimizer = adamw(model)
    compiled = torch.compile(model, backend=backend)  # guilty
    data = in_turn(
        lambda: (
            torch.randn(BATCH, TIME, SERIES, device=device()),
            torch.randn(BATCH, TIME, HORIZON, device=device()),
        )
    )

    def step():
        past, future = next(data)
        with mixed():
            loss = F.smooth_l1_loss(compiled(past), future)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build("aot_eager")


def clean():
    return build("inductor")


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
