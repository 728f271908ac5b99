"""A graph network over a mesh predicts accelerations. Somebody once looked for a NaN and left the anomaly
detection of autograd on: every operator of the forward pass stores a stack trace, and every gradient is
tested for NaN with a wait for the device.
A good finding names the anomaly detection, and the line that switches it on.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "autograd's anomaly detection is left on",
    "FIX": "switch it off: torch.autograd.set_detect_anomaly(False)",
}
NODES, EDGES = by_device(24_000, 1200), by_device(144_000, 7200)
WIDTH, LAYERS = by_device(256, 24), by_device(10, 5)


def mlp(inside, outside):
    return nn.Sequential(
        nn.Linear(inside, WIDTH), nn.SiLU(), nn.Linear(WIDTH, outside), nn.LayerNorm(outside)
    )


class Pass(nn.Module):
    def __init__(self):
        super().__init__()
        self.edge, self.node = mlp(3 * WIDTH, WIDTH), mlp(2 * WIDTH, WIDTH)

    def forward(self, nodes, edges, start, end):
        ends = nodes.index_select(0, start), nodes.index_select(0, end)
        edges = edges + self.edge(torch.cat([edges, *ends], 1))
        heard = torch.zeros_like(nodes).index_add(0, end, edges)
        return nodes + self.node(torch.cat([nodes, heard], 1)), edges


class MeshNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.nodes, self.edges = mlp(6, WIDTH), mlp(4, WIDTH)
        self.passes = nn.ModuleList(Pass() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, state, shape, start, end):
        nodes, edges = self.nodes(state), self.edges(shape)
        for one in self.passes:
            nodes, edges = one(nodes, edges, start, end)
        return self.head(nodes)


def build():
    model = MeshNet().to(device())
    optimizer = adamw(model)
    start, end = torch.randint(NODES, (2, EDGES), device=device())

    def states():
        state, goal = torch.randn(NODES, 6, device=device()), torch.randn(NODES, 3, device=device())
        return state, torch.randn(EDGES, 4, device=device()), goal

    data = in_turn(states)

    def step():
        state, shape, goal = next(data)
        with mixed():
            loss = F.mse_loss(model(state, shape, start, end), goal)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    torch.autograd.set_detect_anomaly(True)  # guilty
    return build()


def clean():
    return build()


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
