"""A radiance field is trained on rays of 128 samples. The light that reaches a sample is the product
of what all samples before it let through; a Python loop takes this product anew for every sample,
from the first one on.
A good finding names the products in the loop over the samples of the rays.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the transmittance of every sample is a product from the start of the ray, in a loop",
    "FIX": "use one torch.cumprod",
}
RAYS, SAMPLES, WAVES, WIDTH = by_device(4096, 112), 128, 6, by_device(256, 48)


def reach_in_loop(clear):
    return torch.stack([clear[:, :n].prod(1) for n in range(SAMPLES)], 1)  # guilty


def reach(clear):
    return F.pad(clear[:, :-1], (1, 0), value=1.0).cumprod(1)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("waves", torch.pi * 2.0 ** torch.arange(WAVES))
        self.layers = nn.Sequential(
            nn.Linear(6 * WAVES, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, 4),
        )

    def forward(self, points):
        angles = (points.unsqueeze(-1) * self.waves).flatten(-2)
        return self.layers(torch.cat([angles.sin(), angles.cos()], -1))


def build(transmittance):
    model = Field().to(device())
    optimizer = adamw(model)
    depth = torch.linspace(0.5, 2.0, SAMPLES, device=device())
    width = 1.5 / SAMPLES

    def batch():
        start = torch.randn(RAYS, 1, 3, device=device())
        way = F.normalize(torch.randn(RAYS, 1, 3, device=device()), dim=-1)
        return start + way * depth[:, None], torch.rand(RAYS, 3, device=device())

    data = in_turn(batch)

    def step():
        points, color = next(data)
        with mixed():
            out = model(points)
        out = out.float()
        clear = torch.exp(-F.softplus(out[..., 3]) * width)
        weights = (1 - clear) * transmittance(clear)
        seen = (weights.unsqueeze(-1) * out[..., :3].sigmoid()).sum(1)
        loss = F.mse_loss(seen, color)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(reach_in_loop)


def clean():
    return build(reach)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
