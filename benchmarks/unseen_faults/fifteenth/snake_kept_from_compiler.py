"""A vocoder with the periodic activation of BigVGAN, x + sin(ax)^2 / a, is compiled. Two releases of
torch ago the activation did not compile, so somebody put `torch.compiler.disable` on it, and there
it stayed: each of them breaks the graph and runs op by op, with all of its intermediate tensors.
A good finding names the activation that is left out of the compilation (or the graph breaks there)
and its line or the one of the decorator.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the activation is marked torch.compiler.disable, so it runs op by op between pieces of graph",
    "FIX": "take the decorator away, so that the activation is fused",
}
BATCH, FRAMES, BANDS = by_device(16, 8), by_device(64, 152), 80
WIDTH, STAGES, UNITS = by_device(512, 48), by_device(4, 2), 2


class Snake(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.zeros(width, 1))

    def forward(self, x):
        alpha = self.log_alpha.exp()
        return x + torch.sin(alpha * x).square() / (alpha + 1e-6)


class SnakeApart(Snake):
    @torch.compiler.disable
    def forward(self, x):
        alpha = self.log_alpha.exp()
        return x + torch.sin(alpha * x).square() / (alpha + 1e-6)  # guilty


class Unit(nn.Module):
    def __init__(self, width, dilation, activation):
        super().__init__()
        self.act1, self.act2 = activation(width), activation(width)
        self.conv1 = nn.Conv1d(width, width, 3, padding=dilation, dilation=dilation)
        self.conv2 = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x):
        return x + self.conv2(self.act2(self.conv1(self.act1(x))))


class Vocoder(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.start = nn.Conv1d(BANDS, WIDTH, 7, padding=3)
        stages, width = [], WIDTH
        for _ in range(STAGES):
            stages.append(nn.ConvTranspose1d(width, width // 2, 8, stride=4, padding=2))
            width //= 2
            stages += [Unit(width, 3**i, activation) for i in range(UNITS)]
        self.stages = nn.Sequential(*stages)
        self.last, self.end = activation(width), nn.Conv1d(width, 1, 7, padding=3)

    def forward(self, bands):
        return self.end(self.last(self.stages(self.start(bands)))).tanh()[:, 0]


def build(activation):
    model = Vocoder(activation).to(device())
    compiled = torch.compile(model)
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, BANDS, FRAMES, device=device()),
            torch.randn(BATCH, FRAMES * 4**STAGES, device=device()).tanh(),
        )
    )

    def step():
        bands, waves = next(data)
        with mixed():
            loss = F.l1_loss(compiled(bands), waves)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def faulty():
    return build(SnakeApart)


def clean():
    return build(Snake)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
