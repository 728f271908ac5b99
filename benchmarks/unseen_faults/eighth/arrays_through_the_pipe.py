"""Recordings of 32 channels come from loader workers, but the collate function returns the list of
numpy arrays as it is. So every array is pickled and sent through a pipe instead of lying in shared
memory, and the training loop itself stacks the batch and copies it from pageable memory.
A good finding names the stacking, the unpickling or the wait for the batch, and the line of the
collate function or of the stacking.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

from common import Block, adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "workers return lists of numpy arrays, which go through a pipe and are stacked in the training process",
    "FIX": "let the workers collate to tensors (default_collate), which are shared and pinned",
}
BATCH, CHANNELS, TIME, PATCH = by_device(64, 16), by_device(32, 8), by_device(4096, 2048), 16
WIDTH, LAYERS, CLASSES = by_device(768, 64), by_device(6, 1), 10


class Recordings(Dataset):
    """Windows of one long recording."""

    def __init__(self):
        draw = np.random.default_rng(0)
        self.signal = draw.standard_normal((CHANNELS, 64 * TIME), dtype=np.float32)

    def __len__(self):
        return 200_000

    def __getitem__(self, i):
        start = i * 997 % (63 * TIME)
        return np.ascontiguousarray(self.signal[:, start : start + TIME]), i % CLASSES


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Conv1d(CHANNELS, WIDTH, PATCH, PATCH)
        self.blocks = nn.Sequential(*(Block(WIDTH, WIDTH // 64) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.embed(x).transpose(1, 2))).mean(1))


def as_list(samples):
    return samples


def loaded(collate):
    model = Model().to(device())
    loader = DataLoader(
        Recordings(), BATCH, num_workers=4, pin_memory=device() == "cuda", collate_fn=collate
    )
    return model, adamw(model), iter(loader)


def train(model, optimizer, x, y):
    x, y = x.to(device(), non_blocking=True), y.to(device(), non_blocking=True)
    with mixed():
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, optimizer, data = loaded(as_list)  # guilty

    def step():
        samples = next(data)
        x = torch.from_numpy(np.stack([signal for signal, _ in samples]))
        y = torch.tensor([label for _, label in samples])
        return train(model, optimizer, x, y)

    return step


def clean():
    model, optimizer, data = loaded(default_collate)

    def step():
        x, y = next(data)
        return train(model, optimizer, x, y)

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
