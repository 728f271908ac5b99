"""A graph network classifies the papers of a citation graph, which never changes. The model takes the
list of edges, as the tutorials have it, and makes the normalized sparse matrix of them in its
forward pass: self loops, degrees, and a conversion to compressed rows that sorts all edges. It is
the same matrix in every step.
A good finding names the sparse matrix that is built (or sorted) again in each step and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the normalized adjacency of a fixed graph is built and sorted in every forward pass",
    "FIX": "build it once before the training and keep it as a buffer",
}
PAPERS, LINKS = by_device(170_000, 12_000), by_device(2_300_000, 170_000)
FEATURES, WIDTH, TOPICS = by_device(128, 96), by_device(256, 40), 40


def normalized(edges):
    loops = torch.arange(PAPERS, device=edges.device).expand(2, -1)
    edges = torch.cat((edges, loops), 1)
    degrees = torch.zeros(PAPERS, device=edges.device)
    degrees.index_add_(0, edges[1], torch.ones_like(edges[1], dtype=torch.float))
    scale = degrees.rsqrt()
    values = scale[edges[0]] * scale[edges[1]]
    return torch.sparse_coo_tensor(edges, values, (PAPERS, PAPERS)).to_sparse_csr()  # guilty


class Propagate(torch.autograd.Function):
    """The product with a symmetric matrix, which is its own transpose in the backward pass."""

    @staticmethod
    def forward(ctx, adjacency, x):
        ctx.adjacency = adjacency
        return torch.sparse.mm(adjacency, x)

    @staticmethod
    def backward(ctx, gradient):
        return None, torch.sparse.mm(ctx.adjacency, gradient)


class GraphConv(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.linear = nn.Linear(before, after, bias=False)
        self.bias = nn.Parameter(torch.zeros(after))

    def forward(self, x, adjacency):
        x = self.linear(x).float()
        with torch.autocast(x.device.type, enabled=False):
            return Propagate.apply(adjacency, x) + self.bias


class GCN(nn.Module):
    def __init__(self, adjacency=None):
        super().__init__()
        self.register_buffer("adjacency", adjacency, persistent=False)
        self.conv1, self.conv2 = GraphConv(FEATURES, WIDTH), GraphConv(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOPICS)

    def forward(self, x, edges):
        adjacency = normalized(edges) if self.adjacency is None else self.adjacency
        x = F.dropout(F.relu(self.conv1(x, adjacency)), 0.3, self.training)
        x = F.dropout(F.relu(self.conv2(x, adjacency)), 0.3, self.training)
        return self.head(x)


def citations():
    """Return edges in both directions, none twice."""
    pairs = torch.randint(PAPERS, (2, LINKS))
    pairs = pairs[:, pairs[0] < pairs[1]].unique(dim=1)
    both = torch.cat((pairs, pairs.flip(0)), 1)
    return both[:, torch.randperm(both.shape[1])].contiguous()


def build(ahead):
    edges = citations().to(device())
    model = GCN(normalized(edges) if ahead else None).to(device())
    optimizer = adamw(model)
    x = torch.randn(PAPERS, FEATURES, device=device())
    topics = torch.randint(TOPICS, (PAPERS,), device=device())
    train = torch.randperm(PAPERS, device=device())[: PAPERS // 2]
    wanted = topics[train]

    def step():
        with mixed():
            loss = F.cross_entropy(model(x, edges)[train], wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def faulty():
    return build(ahead=False)


def clean():
    return build(ahead=True)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
