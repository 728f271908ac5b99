"""Domain adaptation of a tabular classifier: features of source and target rows are drawn together
by a maximum mean discrepancy with five Gaussian kernels. The squared distances of all pairs of rows
are computed anew for each of the five bandwidths.
A good finding names the distances of all pairs, computed five times from the same features.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the distances of all pairs of rows are computed again for each bandwidth of the MMD",
    "FIX": "compute the distances once and use them for all bandwidths",
}
ROWS, COLUMNS, WIDTH, CLASSES = by_device(2048, 256), 40, by_device(1024, 256), 8
BANDWIDTHS = (4.0, 8.0, 16.0, 32.0, 64.0)


def distances(z):
    length = z.square().sum(1)
    return (length[:, None] + length - 2 * z @ z.T).clamp(min=0)


def kernels_faulty(z):
    return sum(torch.exp(-distances(z) / width) for width in BANDWIDTHS)  # guilty


def kernels_clean(z):
    apart = distances(z)
    return sum(torch.exp(-apart / width) for width in BANDWIDTHS)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Linear(COLUMNS, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
        )
        self.head = nn.Linear(WIDTH, CLASSES)


def build(kernels):
    model = Classifier().to(device())
    optimizer = adamw(model)

    def batch():
        source = torch.randn(ROWS, COLUMNS, device=device())
        target = 0.5 + torch.randn(ROWS, COLUMNS, device=device())
        return torch.cat([source, target]), torch.randint(CLASSES, (ROWS,), device=device())

    data = in_turn(batch)

    def step():
        rows, labels = next(data)
        with mixed():
            z = model.features(rows)
            logits = model.head(z[:ROWS].relu())
        k = kernels(z.float())
        gap = k[:ROWS, :ROWS].mean() + k[ROWS:, ROWS:].mean() - 2 * k[:ROWS, ROWS:].mean()
        loss = F.cross_entropy(logits.float(), labels) + gap
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(kernels_faulty)


def clean():
    return build(kernels_clean)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
