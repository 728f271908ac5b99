"""A network for point clouds makes a new graph of nearest neighbours in each layer. It finds them by
sorting all distances of each point with `argsort` and taking the first few columns: of several
hundred numbers per row, in order, a dozen is used, in any order.
A good finding names the sort of all distances of which only the nearest are used and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "all distances are sorted by argsort to find a dozen nearest neighbours",
    "FIX": "take the nearest with topk(largest=False, sorted=False)",
}
BATCH, POINTS, NEAR = by_device(32, 4), by_device(2048, 256), by_device(20, 12)
WIDTH, LAYERS, CLASSES = by_device(128, 48), by_device(4, 3), 40


def by_sorting(distances):
    return distances.argsort(-1)[..., :NEAR]  # guilty


def by_selection(distances):
    return distances.topk(NEAR, largest=False, sorted=False).indices


class EdgeConv(nn.Module):
    def __init__(self, before, nearest):
        super().__init__()
        self.nearest = nearest
        self.center, self.edge = nn.Linear(before, WIDTH), nn.Linear(before, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        with torch.no_grad():
            rows = self.nearest(torch.cdist(x.float(), x.float()))
        rows = rows + torch.arange(len(x), device=x.device)[:, None, None] * POINTS
        messages = self.edge(x).flatten(0, 1)
        near = F.embedding(rows.flatten(), messages).view(*rows.shape, WIDTH)
        return F.gelu(self.norm(self.center(x) + near.amax(2)))


class PointNetwork(nn.Module):
    def __init__(self, nearest):
        super().__init__()
        self.layers = nn.ModuleList(EdgeConv(WIDTH if i else 3, nearest) for i in range(LAYERS))
        self.mix = nn.Linear(LAYERS * WIDTH, 4 * WIDTH)
        self.head = nn.Linear(4 * WIDTH, CLASSES)

    def forward(self, points):
        x, states = points, []
        for layer in self.layers:
            x = layer(x)
            states.append(x)
        return self.head(self.mix(torch.cat(states, -1)).amax(1))


def build(nearest):
    model = PointNetwork(nearest).to(device())
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, POINTS, 3, device=device()),
            torch.randint(CLASSES, (BATCH,), device=device()),
        )
    )

    def step():
        points, classes = next(data)
        with mixed():
            loss = F.cross_entropy(model(points), classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def faulty():
    return build(by_sorting)


def clean():
    return build(by_selection)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
