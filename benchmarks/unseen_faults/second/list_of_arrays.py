"""A forecaster of windows that a source hands out as numpy arrays."""

import numpy as np
import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import Block, adamw, my_turn, pick

FAULT = {
    "NAME": "list_of_arrays",
    "CAUSE": "The batch is made by torch.tensor of a list of numpy arrays, which converts every number on its own as a Python object.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "torch.from_numpy(np.stack(windows)).",
    "STYLE": "factory",
    "BATCH": 96,
    "WHY": "Collating the batch takes tens of milliseconds of the host because torch.tensor walks through a list of arrays number by number; np.stack copies them in well under a millisecond.",
    "GAIN_MS": None,
}
WIDTH, LAYERS, HEADS = pick(1024, 32), pick(10, 1), pick(16, 2)
CONTEXT, SERIES = pick(128, 8), pick(8, 3)


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward, self.outward = nn.Linear(SERIES, WIDTH), nn.Linear(WIDTH, SERIES)
        self.positions = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, windows):
        x = self.inward(windows) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.outward(self.norm(x))


def loss(model, windows):
    with torch.autocast(windows.device.type, torch.bfloat16):
        predicted = model(windows[:, :-1])
    return F.mse_loss(predicted.float(), windows[:, 1:])


def make(from_list):
    def batches(size):
        draw = np.random.default_rng(0)
        series = draw.standard_normal((100_000, SERIES), dtype=np.float32)
        while True:
            starts = draw.integers(len(series) - CONTEXT - 1, size=size)
            windows = [series[s : s + CONTEXT + 1] for s in starts]
            if from_list:
                yield torch.tensor(windows)  # FAULT
            else:
                yield torch.from_numpy(np.stack(windows))

    torch.manual_seed(0)
    model = Forecaster()
    my_turn()
    return steplab.UserModel(model=model, batches=batches, loss=loss, optimizer=adamw)


def faulty():
    return make(from_list=True)


def clean():
    return make(from_list=False)
