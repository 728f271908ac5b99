"""Muon orthogonalizes its momenta with products x @ x.mT. For a matrix with four times as many rows
as columns that product is rows x rows, sixteen times as large as the one of the transposed matrix,
and it is squared. Everybody transposes tall matrices first; this script forgot it.
A good finding names the products of the orthogonalization (or their size) and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "tall matrices are orthogonalized without transposing them: the product x @ x.mT is rows x rows instead of columns x columns",
    "FIX": "transpose where there are more rows than columns, and transpose back",
}
ROWS, WIDTH, LAYERS, INPUTS = by_device(16384, 512), by_device(1024, 128), by_device(8, 3), 64
HALF = torch.bfloat16 if device() == "cuda" else torch.float32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def orthogonal_as_is(x):
    x = x / x.norm(dim=(-2, -1), keepdim=True)
    for _ in range(5):
        gram = x @ x.mT  # guilty
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x


def orthogonal(x):
    tall = x.size(-2) > x.size(-1)
    x = x / x.norm(dim=(-2, -1), keepdim=True)
    x = x.mT if tall else x
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def build(make_orthogonal):
    blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
    model = nn.Sequential(nn.Linear(INPUTS, WIDTH), blocks, nn.Linear(WIDTH, INPUTS)).to(device())
    groups = [[block.up.weight for block in blocks], [block.down.weight for block in blocks]]
    momenta = [torch.zeros_like(torch.stack(group)) for group in groups]
    matrices = {id(p) for group in groups for p in group}
    others = [p for p in model.parameters() if id(p) not in matrices]
    adam = torch.optim.AdamW(others, lr=3e-4, fused=True)
    data = in_turn(lambda: torch.randn(ROWS, INPUTS, device=device()))

    @torch.no_grad()
    def muon():
        for group, momentum in zip(groups, momenta, strict=True):
            momentum.lerp_(torch.stack([p.grad for p in group]), 0.05)
            update = make_orthogonal(momentum.to(HALF)).float()
            torch._foreach_add_(group, list(update.unbind()), alpha=-0.002)
            for p in group:
                p.grad = None

    def step():
        x = next(data)
        with mixed():
            loss = F.mse_loss(model(x).float(), x)
        loss.backward()
        muon()
        adam.step()
        adam.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(orthogonal_as_is)


def clean():
    return build(orthogonal)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
