"""A network of signed distances (DeepSDF) is an MLP on points in space with a code for each shape, and
is compiled. As in the published code, the code of a shape is repeated for each of its points and
concatenated to the coordinates, at the start and again at the skip connection. So the products of
code and weights, one per shape, are computed thousands of times over, forward and backward.
A good finding names the layers that compute on the code repeated for every point and one of the
lines: the concatenation or the product.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the code of a shape is repeated for all its points before the linear layers that take it",
    "FIX": "split the weight: multiply the code once per shape and add the result to all points",
}
SHAPES, BATCH, POINTS = by_device(4096, 256), by_device(64, 8), by_device(8192, 320)
CODE, WIDTH, LAYERS = 256, by_device(512, 96), 4


class JoinRepeated(nn.Module):
    """Linear on (x, code)."""

    def __init__(self, before):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, before + CODE) * (before + CODE) ** -0.5)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x, code):
        x = torch.cat((x, code[:, None].repeat(1, x.shape[1], 1)), -1)
        return F.linear(x, self.weight, self.bias)  # guilty


class JoinAdded(JoinRepeated):
    def forward(self, x, code):
        for_x, for_code = self.weight.split([x.shape[-1], CODE], 1)
        return F.linear(x, for_x) + F.linear(code, for_code, self.bias)[:, None]


class Distances(nn.Module):
    def __init__(self, join):
        super().__init__()
        self.codes = nn.Embedding(SHAPES, CODE)
        self.start, self.skip = join(3), join(WIDTH)
        self.early = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS // 2))
        self.late = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS // 2))
        self.end = nn.Linear(WIDTH, 1)

    def forward(self, shapes, points):
        code = self.codes(shapes)
        x = F.softplus(self.start(points, code), beta=100)
        for layer in self.early:
            x = F.relu(layer(x))
        x = F.relu(self.skip(x, code))
        for layer in self.late:
            x = F.relu(layer(x))
        return self.end(x)[..., 0].tanh(), code


def build(join):
    model = Distances(join).to(device())
    compiled = torch.compile(model)
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.randint(SHAPES, (BATCH,), device=device()),
            torch.rand(BATCH, POINTS, 3, device=device()) * 2 - 1,
            torch.randn(BATCH, POINTS, device=device()) * 0.05,
        )
    )

    def step():
        shapes, points, truth = next(data)
        with mixed():
            guess, code = compiled(shapes, points)
        loss = F.l1_loss(guess.float().clamp(-0.1, 0.1), truth.clamp(-0.1, 0.1))
        loss = loss + 1e-4 * code.float().square().sum(1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def faulty():
    return build(JoinRepeated)


def clean():
    return build(JoinAdded)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
