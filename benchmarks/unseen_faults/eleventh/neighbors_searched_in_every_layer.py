"""A network labels the points of a cloud: in each of four layers a point takes the maximum over its
16 nearest neighbors in space. The neighbors are searched for in every layer although the
coordinates do not change.
A good finding names the search of the nearest neighbors, repeated with the same coordinates.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the nearest neighbors of the same coordinates are searched for again in every layer",
    "FIX": "search once in the model's forward and hand the neighbors to all layers",
}
CLOUDS, POINTS, NEAR, CLASSES = by_device(16, 2), by_device(1024, 400), 16, 13
WIDTH, LAYERS = by_device(128, 48), 4


@torch.no_grad()
def neighbors(xyz):
    near = torch.cdist(xyz, xyz).topk(NEAR, largest=False).indices
    first = torch.arange(len(xyz), device=xyz.device) * POINTS
    return (near + first[:, None, None]).flatten()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.here, self.there = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, near):
        around = self.there(x).flatten(0, 1).index_select(0, near)
        around = around.view(*x.shape[:2], NEAR, WIDTH).amax(2)
        return x + F.relu(self.norm(self.here(x) + around))


class SearchingLayer(Layer):
    def forward(self, x, xyz):
        return super().forward(x, neighbors(xyz))  # guilty


class Cloud(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.inside, self.outside = nn.Linear(3, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))

    def forward(self, xyz, where):
        x = self.inside(xyz)
        for layer in self.layers:
            x = layer(x, where)
        return self.outside(x)


def build(layer, prepare):
    model = Cloud(layer).to(device())
    optimizer = adamw(model)
    shape = (CLOUDS, POINTS)
    data = in_turn(
        lambda: (
            torch.rand(*shape, 3, device=device()),
            torch.randint(CLASSES, shape, device=device()),
        )
    )

    def step():
        xyz, labels = next(data)
        where = prepare(xyz)
        with mixed():
            logits = model(xyz, where)
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(SearchingLayer, lambda xyz: xyz)


def clean():
    return build(Layer, neighbors)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
