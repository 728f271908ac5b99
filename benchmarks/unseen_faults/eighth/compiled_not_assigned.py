"""torch.compile(net) returns the compiled module; unlike net.compile() it does not change net.
The script drops what it returns and trains net, which runs eagerly.
A good finding names that the network runs uncompiled (its unfused elementwise work) and the line of
torch.compile or of the call.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the module that torch.compile returns is dropped, so the network is trained eagerly",
    "FIX": "net = torch.compile(net), or net.compile()",
}
BATCH, TIME, WIDTH = by_device(64, 8), by_device(1024, 128), by_device(512, 128)
LAYERS, PIXELS, HEADS = by_device(3, 1), 16, by_device(8, 2)


class Block(nn.Module):
    """A block of a diffusion transformer: shift, scale and gate come from the time."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.time = nn.Linear(WIDTH, 6 * WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, when):
        b, t, w = x.shape
        shift1, scale1, gate1, shift2, scale2, gate2 = self.time(F.silu(when))[:, None].chunk(6, -1)
        y = self.norm(x) * (1 + scale1) + shift1
        q, k, v = self.qkv(y).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, w)
        x = x + gate1 * self.proj(y)
        y = self.norm(x) * (1 + scale2) + shift2
        y, gate = self.up(y).chunk(2, -1)
        return x + gate2 * self.down(y * F.gelu(gate))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.when = nn.Linear(PIXELS, WIDTH), nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.out = nn.Linear(WIDTH, PIXELS)

    def forward(self, x, when):
        x, when = self.embed(x), self.when(when)
        for block in self.blocks:
            x = block(x, when)
        return self.out(x)


def prepare():
    net = Net().to(device())
    data = in_turn(
        lambda: (
            torch.randn(BATCH, TIME, PIXELS, device=device()),
            torch.randn(BATCH, TIME, PIXELS, device=device()),
            torch.rand(BATCH, 1, device=device()),
        )
    )
    return net, adamw(net), data


def train(net, optimizer, images, noise, when):
    part = when[:, None]
    with mixed():
        loss = F.mse_loss(net((1 - part) * images + part * noise, when).float(), noise - images)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    net, optimizer, data = prepare()
    torch.compile(net)  # guilty
    return lambda: train(net, optimizer, *next(data))


def clean():
    net, optimizer, data = prepare()
    net = torch.compile(net)
    return lambda: train(net, optimizer, *next(data))


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
