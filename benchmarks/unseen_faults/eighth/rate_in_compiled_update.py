"""The update of a recommender is compiled, and a schedule changes the learning rate, a Python
number, after every step. The compiler takes the number for a constant: it compiles the update anew
in each of the first eight steps and then gives up, so the update runs eagerly from then on.
A good finding names the recompilations, or that the update runs uncompiled, and the line of the rate
or of the compiled update.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the compiled update has the learning rate as a Python float, which the schedule changes: it is compiled anew in every step up to the limit and then runs eagerly",
    "FIX": "make the learning rate a tensor: lr=torch.tensor(3e-4)",
}
BATCH, FIELDS, CODE, ROWS = by_device(2048, 256), by_device(56, 32), by_device(128, 32), 1000
CROSSES, TOTAL = by_device(4, 3), 100_000
WIDTH = FIELDS * CODE


class Ranker(nn.Module):
    """Embeddings and cross layers: x0 * W x + x."""

    def __init__(self):
        super().__init__()
        self.tables = nn.Embedding(FIELDS * ROWS, CODE)
        self.crosses = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(CROSSES))
        self.head = nn.Linear(WIDTH, 1)
        self.register_buffer("first", torch.arange(FIELDS) * ROWS)

    def forward(self, ids):
        x = start = self.tables(ids + self.first).flatten(1)
        for cross in self.crosses:
            x = torch.addcmul(x, start, cross(x))
        return self.head(x).squeeze(1)


def build(make_optimizer):
    with torch.device(device()):
        model = Ranker()
    optimizer = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 - done / TOTAL)
    update = torch.compile(optimizer.step)
    data = in_turn(
        lambda: (
            torch.randint(ROWS, (BATCH, FIELDS), device=device()),
            torch.randint(2, (BATCH,), device=device()).float(),
        )
    )

    def step():
        ids, clicked = next(data)
        with mixed():
            scores = model(ids)
        loss = F.binary_cross_entropy_with_logits(scores.float(), clicked)
        loss.backward()
        update()
        schedule.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def with_float(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-4, capturable=device() == "cuda")  # guilty


def with_tensor(model):
    rate = torch.tensor(3e-4, device=device())
    return torch.optim.AdamW(model.parameters(), lr=rate, capturable=device() == "cuda")


def faulty():
    return build(with_float)


def clean():
    return build(with_tensor)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
