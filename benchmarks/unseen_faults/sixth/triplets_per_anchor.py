"""A retrieval model is trained with the hardest triplets of a batch. The farthest positive and the
nearest negative are picked in a loop over the anchors, each by masks of its row of distances.
A good finding names the hundreds of small lookups with their backward, and the line of the loop.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 1024,
    "CPU_BATCH": 192,
    "CAUSE": "hardest positives and negatives are picked in a Python loop over the anchors of the batch",
    "FIX": "a masked maximum and minimum over the rows of the whole matrix",
}
FEATURES, WIDTH, CLASSES, MARGIN = by_device(512, 128), by_device(2048, 512), 16, 0.3


def one_by_one(distance, same):
    positive, negative = [], []
    for i in range(len(distance)):
        positive.append(distance[i][same[i]].max())
        negative.append(distance[i][~same[i]].min())  # guilty
    return torch.stack(positive), torch.stack(negative)


def all_at_once(distance, same):
    positive = distance.masked_fill(~same, -torch.inf).amax(1)
    return positive, distance.masked_fill(same, torch.inf).amin(1)


def build(hardest):
    my_turn()
    model = nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, 128),
    )

    def batches(size):
        return in_turn(
            lambda: (
                torch.randn(size, FEATURES, device=device()),
                torch.arange(size, device=device()) % CLASSES,
            )
        )

    def loss(model, batch):
        x, y = batch
        with mixed():
            x = F.normalize(model(x), dim=-1)
            distance = 2 - 2 * x @ x.T
        positive, negative = hardest(distance.float(), y[:, None] == y[None])
        return F.relu(positive - negative + MARGIN).mean()

    return steplab.UserModel(model, batches, loss, unit="samples")


def faulty():
    return build(one_by_one)


def clean():
    return build(all_at_once)
