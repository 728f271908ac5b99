"""The dataset returns tokens and labels as Python lists. DataLoader's default collation takes lists
for structure: it makes one tiny tensor per position, and the loop stacks hundreds of them again.
A good finding names the step's wait for the batch, or the many tiny tensors, and the line that takes
the batch or the one that stacks.
"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from common import Decoder, adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "samples are Python lists, so default_collate makes one tensor per position, which are stacked again",
    "FIX": "return tensors from __getitem__",
}
BATCH, CONTEXT, WIDTH, LAYERS = (
    by_device(16, 2),
    by_device(1024, 448),
    by_device(512, 64),
    by_device(6, 1),
)
VOCAB, SAMPLES = by_device(8192, 150), 1200


class Lists(Dataset):
    def __init__(self):
        self.rows = torch.randint(VOCAB, (SAMPLES, CONTEXT + 1)).tolist()

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        return self.rows[i][:-1], self.rows[i][1:]


class Tensors(Lists):
    def __init__(self):
        self.rows = torch.randint(VOCAB, (SAMPLES, CONTEXT + 1))


def from_lists():
    while True:
        for ids, labels in DataLoader(Lists(), BATCH):  # guilty
            yield torch.stack(ids, 1), torch.stack(labels, 1)


def from_tensors():
    while True:
        yield from DataLoader(Tensors(), BATCH)


def build(batches):
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    optimizer, data = adamw(model), batches()

    def step():
        ids, labels = (x.to(device()) for x in next(data))
        with mixed():
            loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(from_lists)


def clean():
    return build(from_tensors)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
