"""An encoder is fine-tuned on tickets of a help desk, with a higher learning rate for the new head and
no weight decay for biases and norms. The helper that makes the parameter groups makes one for every
weight, so the fused optimizer is called once per tensor, hundreds of times in a step. There are
but four kinds of weights, and those of a kind can share a group.
A good finding names the many parameter groups (an update per tensor) and the line, or that of the
optimizer's step.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import Block, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "every weight has a parameter group of its own, so the optimizer updates tensor by tensor",
    "FIX": "put the weights with the same rate and decay into one group",
}
BATCH, CONTEXT, QUEUES = by_device(16, 2), by_device(128, 16), 20
WIDTH, LAYERS, VOCAB = by_device(256, 64), by_device(24, 12), by_device(8192, 512)


class Tickets(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, WIDTH // 64) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, QUEUES)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, -1]))


def options(name, weight):
    """Return the rate and the decay of a weight."""
    return 3e-3 if name.startswith("head") else 3e-4, 0.05 if weight.dim() > 1 else 0.0


def group_each(model):
    groups = []
    for name, weight in model.named_parameters():
        rate, decay = options(name, weight)
        groups.append({"params": [weight], "lr": rate, "weight_decay": decay})  # guilty
    return groups


def group_alike(model):
    groups = {}
    for name, weight in model.named_parameters():
        rate, decay = options(name, weight)
        new = {"params": [], "lr": rate, "weight_decay": decay}
        groups.setdefault((rate, decay), new)["params"].append(weight)
    return list(groups.values())


def build(grouped):
    model = Tickets().to(device())
    optimizer = torch.optim.AdamW(grouped(model), fused=True)
    data = in_turn(
        lambda: (
            torch.randint(VOCAB, (BATCH, CONTEXT), device=device()),
            torch.randint(QUEUES, (BATCH,), device=device()),
        )
    )

    def step():
        ids, queue = next(data)
        with mixed():
            loss = F.cross_entropy(model(ids), queue)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(group_each)


def clean():
    return build(group_alike)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
