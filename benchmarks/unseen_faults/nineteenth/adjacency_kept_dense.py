"""Papers of a citation graph are sorted by topic with a graph convolutional network. The normalized adjacency is
a full matrix of which less than one entry in a hundred is not zero, and each layer multiplies with all of it.
A good finding names the product with a dense matrix that is nearly all zeros (or that product as the step's
cost), and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the graph's adjacency is a dense matrix, nearly all zeros, multiplied in every layer",
    "FIX": "keep the adjacency in a sparse layout (CSR) and multiply with torch.sparse.mm",
}
PAPERS, NEAR = by_device(20_000, 1600), 6
WORDS, WIDTH, TOPICS = by_device(1024, 512), by_device(256, 128), 7


class PaperNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOPICS)

    def forward(self, x, spread):
        x = F.relu(spread(self.first(x)))
        return self.head(F.relu(spread(self.second(x))))


def training(dense):
    torch.manual_seed(0)
    at = device()
    source = torch.arange(PAPERS, device=at).repeat_interleave(NEAR)
    target = torch.randint(PAPERS, (PAPERS * NEAR,), device=at)
    adjacency = torch.eye(PAPERS, device=at)
    adjacency[source, target] = 1
    adjacency[target, source] = 1
    scale = adjacency.sum(1).rsqrt()
    adjacency = adjacency * scale[:, None] * scale
    if not dense:
        adjacency = adjacency.to_sparse_csr()
    words = torch.randn(PAPERS, WORDS, device=at)
    topics = torch.randint(TOPICS, (PAPERS,), device=at)
    model = PaperNet().to(at)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)

    def spread_dense(x):
        return adjacency @ x  # guilty

    def spread_sparse(x):
        return torch.sparse.mm(adjacency, x)

    def step():
        loss = F.cross_entropy(model(words, spread_dense if dense else spread_sparse), topics)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def faulty():
    return training(dense=True)


def clean():
    return training(dense=False)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
