"""One network predicts four things about a shop's customers from the same columns: whether they leave, what
they spend, which segment they are of and when they come back. Each task's loss is sent back by itself,
with retain_graph=True so that the next one can follow. The gradients add up to the same sum, but the
backward pass through the shared trunk, the most of the model, runs four times instead of once.
A good finding names the repeated backward passes through the trunk (or retain_graph), and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "each task's loss goes back through the shared trunk by itself, with retain_graph",
    "FIX": "add the losses up and call backward() once",
}
BATCH, COLUMNS = by_device(8192, 256), by_device(256, 64)
WIDTH, DEPTH, HEAD = by_device(1024, 224), by_device(6, 4), by_device(512, 192)
SEGMENTS = 12


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def head(outputs):
    return nn.Sequential(nn.Linear(WIDTH, HEAD), nn.GELU(), nn.Linear(HEAD, outputs))


class Customers(nn.Module):
    def __init__(self):
        super().__init__()
        blocks = (Residual() for _ in range(DEPTH))
        self.trunk = nn.Sequential(nn.Linear(COLUMNS, WIDTH), *blocks, nn.LayerNorm(WIDTH))
        sizes = {"leaves": 1, "spends": 1, "segment": SEGMENTS, "returns": 1}
        self.heads = nn.ModuleDict({task: head(size) for task, size in sizes.items()})

    def forward(self, columns):
        shared = self.trunk(columns)
        return {task: part(shared).float() for task, part in self.heads.items()}


def losses_of(told, truth):
    return {
        "leaves": F.binary_cross_entropy_with_logits(told["leaves"][:, 0], truth["leaves"]),
        "spends": F.smooth_l1_loss(told["spends"][:, 0], truth["spends"]),
        "segment": F.cross_entropy(told["segment"], truth["segment"]),
        "returns": F.poisson_nll_loss(told["returns"][:, 0], truth["returns"]),
    }


def one_after_another(losses):
    for loss in losses.values():
        loss.backward(retain_graph=True)  # guilty


def all_at_once(losses):
    sum(losses.values()).backward()


def train(go_back):
    torch.manual_seed(0)
    model = Customers().to(device())
    updates = adamw(model)

    def customers():
        truth = {
            "leaves": torch.randint(2, (BATCH,), device=device()).float(),
            "spends": torch.rand(BATCH, device=device()),
            "segment": torch.randint(SEGMENTS, (BATCH,), device=device()),
            "returns": torch.randint(5, (BATCH,), device=device()).float(),
        }
        return torch.randn(BATCH, COLUMNS, device=device()), truth

    stream = in_turn(customers)

    def step():
        columns, truth = next(stream)
        with mixed():
            told = model(columns)
        losses = losses_of(told, truth)
        go_back(losses)
        updates.step()
        updates.zero_grad()
        return sum(losses.values()).detach()

    return step


def faulty():
    return train(one_after_another)


def clean():
    return train(all_at_once)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
