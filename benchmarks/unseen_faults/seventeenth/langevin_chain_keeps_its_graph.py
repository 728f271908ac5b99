"""An energy-based model of images is trained against samples of a Langevin chain of ten moves. The gradient
of the energy by the image is taken with create_graph=True, copied from a gradient penalty, so each move
hangs on the one before, and the activations of all ten live until the samples are detached at the end.
A good finding names the graph of the chain (create_graph) and the line that asks for it.
"""

import torch
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "the Langevin chain takes its gradients with create_graph=True, so all its graphs live on",
    "FIX": "leave create_graph out: nothing is backpropagated through the samples",
}
BATCH, SIDE, WIDTH = by_device(256, 16), by_device(64, 16), by_device(64, 16)
MOVES, RATE, JITTER = by_device(10, 8), 0.1, 0.01


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        layers, inside = [], 3
        for outside in (WIDTH, 2 * WIDTH, 4 * WIDTH):
            layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.SiLU()]
            layers += [nn.Conv2d(outside, outside, 4, stride=2, padding=1), nn.SiLU()]
            inside = outside
        self.body, self.head = nn.Sequential(*layers), nn.Linear(inside, 1)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3))).float()


def gradient_with_graph(total, x):
    return torch.autograd.grad(total, x, create_graph=True)[0]  # guilty


def gradient_alone(total, x):
    return torch.autograd.grad(total, x)[0]


def langevin(energy, x, gradient):
    x.requires_grad_()
    for _ in range(MOVES):
        with mixed():
            total = energy(x).sum()
        x = x - RATE * gradient(total, x) + JITTER * torch.randn_like(x)
    return x.detach()


def build(gradient):
    model = Energy().to(device(), memory_format=torch.channels_last)
    optimizer = adamw(model)

    def photos():
        real = torch.rand(BATCH, 3, SIDE, SIDE, device=device())
        return real.contiguous(memory_format=torch.channels_last)

    data = in_turn(photos)

    def step():
        real = next(data)
        fakes = langevin(model, torch.rand_like(real), gradient)
        with mixed():
            high, low = model(fakes), model(real)
            loss = (low - high).mean() + 0.1 * (low.square() + high.square()).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(gradient_with_graph)


def clean():
    return build(gradient_alone)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
