"""Each sample goes through the adapter of its own market. The adapters are called sample by sample in
a Python loop and the rows are stacked again, hundreds of tiny layers forward and backward.
A good finding names the loop over the samples (or the many tiny calls of the adapters), and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "samples are routed to their adapters one by one in a Python loop",
    "FIX": "sort the samples by market and call each adapter once",
}
BATCH, MARKETS = by_device(1024, 512), 5
FEATURES, WIDTH, INNER = 64, by_device(4096, 640), by_device(1024, 64)


class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return x + self.up(F.relu(self.down(x)))


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()
        )
        self.adapters = nn.ModuleList(Adapter() for _ in range(MARKETS))
        self.head = nn.Linear(WIDTH, 1)

    def adapt(self, h, markets):
        rows = [self.adapters[m](h[i]) for i, m in enumerate(markets)]  # guilty
        return torch.stack(rows)

    def forward(self, x, markets):
        return self.head(self.adapt(self.trunk(x), markets)).squeeze(-1)


class Grouped(Ranker):
    def adapt(self, h, markets):
        markets = torch.tensor(markets)
        order = torch.argsort(markets)
        counts = torch.bincount(markets, minlength=MARKETS).tolist()
        back = torch.argsort(order)
        order, back = (t.to(h.device, non_blocking=True) for t in (order, back))
        parts = h.index_select(0, order).split(counts)
        done = [adapter(part) for adapter, part in zip(self.adapters, parts, strict=True)]
        return torch.cat(done).index_select(0, back)


def prepare(kind):
    model = kind().to(device())
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, FEATURES, device=device()),
            torch.randint(MARKETS, (BATCH,)).tolist(),
            torch.randint(2, (BATCH,), device=device()).float(),
        )
    )

    def step():
        x, markets, clicked = next(data)
        with mixed():
            score = model(x, markets)
        loss = F.binary_cross_entropy_with_logits(score.float(), clicked)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def faulty():
    return prepare(Ranker)


def clean():
    return prepare(Grouped)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
