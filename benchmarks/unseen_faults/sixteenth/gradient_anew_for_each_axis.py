"""A physics-informed network solves a Poisson equation in three dimensions; its residual needs the
Laplacian. The loop over the axes takes the gradient of the solution again for each axis, to use one
component of it, before it derives that component a second time.
A good finding names the first gradient, computed anew for each axis (the same autograd.grad call three
times), and the line.
"""

import torch
from torch import nn

from common import adamw, by_device, device, in_turn, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the gradient of the solution is computed again for each axis of the Laplacian",
    "FIX": "take the gradient once before the loop and derive its components",
}
POINTS, WIDTH, LAYERS, AXES = by_device(16_384, 1024), by_device(256, 64), by_device(6, 3), 5


class Solution(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [AXES] + [WIDTH] * LAYERS
        self.layers = nn.ModuleList(
            nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False)
        )
        self.end = nn.Linear(WIDTH, 1)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.end(x)


def derive(y, x):
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def laplacian_axis_by_axis(u, x):
    total = 0
    for axis in range(AXES):
        slope = derive(u, x)[:, axis]  # guilty
        total = total + derive(slope, x)[:, axis]
    return total


def laplacian(u, x):
    slopes = derive(u, x)
    total = 0
    for axis in range(AXES):
        total = total + derive(slopes[:, axis], x)[:, axis]
    return total


def build(second_derivatives):
    model = Solution().to(device())
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.rand(POINTS, AXES, device=device()).requires_grad_(),
            torch.rand(POINTS // 4, AXES, device=device()).round(decimals=1),
        )
    )

    def step():
        inside, border = next(data)
        source = torch.sin(torch.pi * inside.detach()).prod(-1)
        residual = second_derivatives(model(inside), inside) + source
        loss = residual.square().mean() + model(border).square().mean()
        model.zero_grad()
        loss.backward(inputs=list(model.parameters()))
        optimizer.step()
        return loss.detach()

    return step


def faulty():
    return build(laplacian_axis_by_axis)


def clean():
    return build(laplacian)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
