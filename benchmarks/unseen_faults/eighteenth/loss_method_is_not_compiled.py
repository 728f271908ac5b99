"""A diffusion transformer for small molecules' conformers is compiled and trained, and its module has a method
of its own that makes the noise and the loss. torch.compile compiles calls of the module, that is forward;
a method that is called by its name is looked up in the module inside and runs as it is written. So all the
gates, norms and activations of the model run one by one, as if there were no compilation.
A good finding names the elementwise operations that run unfused, or that the compiled model is never
called, and the line that calls the method.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the loss is a method of the compiled module, which runs uncompiled when called by name",
    "FIX": "call the compiled module itself, and take the loss from what it returns",
}
BATCH, ATOMS = by_device(64, 16), by_device(128, 64)
WIDTH, LAYERS = by_device(512, 64), by_device(8, 4)


def norm(x):
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.shape = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(ATOMS, ATOMS)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, level):
        shift, scale, gate = self.shape(level)[:, None].chunk(3, dim=-1)
        y = norm(x) * (1 + scale) + shift
        x = x + torch.tanh(gate) * self.mix(y.mT).mT
        a, b = self.up(norm(x) * (1 + scale) + shift).chunk(2, dim=-1)
        return x + torch.tanh(gate) * self.down(a * torch.sigmoid(1.702 * a) * b)


class ConformerDenoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.level, self.outside = nn.Linear(3, WIDTH), nn.Linear(1, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, noisy, level):
        x, code = self.inside(noisy), self.level(level)
        for layer in self.layers:
            x = layer(x, code)
        return self.outside(norm(x))

    def loss(self, places, level, noise):
        told = self(torch.lerp(places, noise, level[:, None]), level)
        return F.mse_loss(told, noise - places)


def by_method(model, places, level, noise):
    return model.loss(places, level, noise)  # guilty


def by_call(model, places, level, noise):
    told = model(torch.lerp(places, noise, level[:, None]), level)
    return F.mse_loss(told, noise - places)


def make(loss_of):
    torch.manual_seed(0)
    model = torch.compile(ConformerDenoiser().to(device()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    conformers = in_turn(lambda: torch.randn(BATCH, ATOMS, 3, device=device()))

    def step():
        places = next(conformers)
        level, noise = torch.rand(BATCH, 1, device=device()), torch.randn_like(places)
        with mixed():
            loss = loss_of(model, places, level, noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def faulty():
    return make(by_method)


def clean():
    return make(by_call)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
