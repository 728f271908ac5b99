"""A network is trained to fulfil the heat equation in a room (a PINN): the residual needs the first
derivatives of the temperature by x, y, z and t, and the second ones by x, y and z. The four coordinates
are tensors of their own, and a helper asks autograd for one derivative after the other, so the same
backward pass through the network, with a graph to differentiate again, is made once for each coordinate.
A good finding names the repeated autograd.grad passes over one forward pass and the line that asks for
the first derivatives one by one.
"""

from itertools import pairwise

import torch
from torch import nn

from common import by_device, device, in_turn, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "one backward pass through the network for each coordinate, though one gives all of them",
    "FIX": "ask once for all: torch.autograd.grad(u.sum(), (x, y, z, t), create_graph=True)",
}
POINTS, WIDTH, LAYERS = by_device(65_536, 512), by_device(256, 96), 4
DIFFUSIVITY = 0.1


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = [4] + [WIDTH] * LAYERS
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x, y, z, t):
        h = torch.stack((x, y, z, t), dim=1)
        for layer in self.hidden:
            h = torch.tanh(layer(h))
        return self.out(h).squeeze(1)


def derivative(of, by):
    return torch.autograd.grad(of.sum(), by, create_graph=True)[0]


def one_by_one(u, x, y, z, t):
    return [derivative(u, axis) for axis in (x, y, z, t)]  # guilty


def together(u, x, y, z, t):
    return torch.autograd.grad(u.sum(), (x, y, z, t), create_graph=True)


def make(first_derivatives):
    torch.manual_seed(0)
    model = Temperature().to(device())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    points = in_turn(lambda: torch.rand(4, POINTS, device=device()))

    def step():
        x, y, z, t = (axis.clone().requires_grad_() for axis in next(points))
        u = model(x, y, z, t)
        u_x, u_y, u_z, u_t = first_derivatives(u, x, y, z, t)
        curvature = derivative(u_x, x) + derivative(u_y, y) + derivative(u_z, z)
        residual = u_t - DIFFUSIVITY * curvature
        place = torch.stack((x, y, z)).detach()
        start = model(*place, torch.zeros(POINTS, device=device()))
        wanted = torch.sin(torch.pi * place).prod(0)
        loss = residual.square().mean() + (start - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def faulty():
    return make(one_by_one)


def clean():
    return make(together)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
