"""A small transformer learns the structure of a graph from random walks, as from sentences. The walks
of every batch are drawn on the host in two Python loops, walk by walk and node by node, with a search
in a dozen weights for each, and the device waits for them. All walks can take a step together: one
search in a flat array of all edges per time.
A good finding names the drawing of the walks in Python (or the wait for the batch) and the line.
"""

import numpy as np
import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "random walks are drawn node by node in a Python loop in every step",
    "FIX": "let all walks of the batch step together with arrays",
}
NODES, DEGREE = by_device(8192, 128), 12
WALKS, LENGTH = by_device(384, 200), by_device(80, 32)
WIDTH, LAYERS = by_device(384, 24), by_device(4, 1)


class Graph:
    """Neighbors of each node, one after the other, and their cumulative weights, up to 1."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.flat = rng.integers(NODES, size=(NODES, DEGREE))
        self.weight = rng.random((NODES, DEGREE)).cumsum(1)
        self.weight /= self.weight[:, -1:]


class OneByOne(Graph):
    def walks(self, starts, chance):
        """Follow a walk from each start; chance is (walks, length)."""
        walks = []
        for node, row in zip(starts, chance, strict=True):
            walk = [node]
            for c in row:
                node = self.flat[node, self.weight[node].searchsorted(c, side="right")]  # guilty
                walk.append(node)
            walks.append(walk)
        return np.array(walks)


class Together(Graph):
    def __init__(self):
        super().__init__()
        self.edges = (self.weight + np.arange(NODES)[:, None]).ravel()
        self.ends = self.flat.ravel()

    def walks(self, starts, chance):
        """Follow a walk from each start; chance is (walks, length)."""
        walks = np.empty((len(starts), chance.shape[1] + 1), np.int64)
        walks[:, 0] = node = starts
        for t in range(chance.shape[1]):
            edge = np.searchsorted(self.edges, node + chance[:, t], side="right")
            walks[:, t + 1] = node = self.ends[edge]
        return walks


def build(kind):
    model = Decoder(WIDTH, LAYERS, NODES, LENGTH).to(device())
    optimizer, graph = adamw(model), kind()
    rng = np.random.default_rng(1)

    def batch():
        starts = rng.integers(NODES, size=WALKS)
        walks = torch.from_numpy(graph.walks(starts, rng.random((WALKS, LENGTH))))
        if device() == "cuda":
            walks = walks.pin_memory().to("cuda", non_blocking=True)
        return walks

    def step():
        walks = batch()
        with mixed():
            logits = model(walks[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), walks[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(OneByOne)


def clean():
    return build(Together)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
