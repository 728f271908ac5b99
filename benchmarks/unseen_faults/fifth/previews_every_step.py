"""An autoencoder writes its inputs and reconstructions as a compressed file to look at, in every
step instead of now and then: the compression takes as long as the training.
A good finding names the time that the host spends outside of torch, in the compression, and the
line that writes the previews.
"""

import os
import tempfile
from itertools import count

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "inputs and reconstructions are compressed and written to a file in every step",
    "FIX": "write a few of them every few hundred steps",
}
BATCH, SIDE, CHANNELS, EVERY = by_device(256, 56), by_device(64, 32), by_device(128, 24), 500


def prepare():
    model = nn.Sequential(
        nn.Conv2d(3, CHANNELS, 4, 2, 1),
        nn.ReLU(),
        nn.Conv2d(CHANNELS, 2 * CHANNELS, 4, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * CHANNELS, CHANNELS, 4, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(CHANNELS, 3, 4, 2, 1),
    ).to(device(), memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    images = in_turn(
        lambda: torch.rand(BATCH, 3, SIDE, SIDE, device=device()).contiguous(
            memory_format=torch.channels_last
        )
    )
    return model, optimizer, images, os.path.join(tempfile.mkdtemp(), "previews.npz")


def write(path, images, outputs):
    both = torch.cat([images, outputs.detach().float()]).clamp(0, 1)
    np.savez_compressed(path, (255 * both).byte().cpu().numpy())


def update(model, optimizer, images):
    with mixed():
        outputs = model(images)
        loss = F.mse_loss(outputs, images)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), outputs


def faulty():
    model, optimizer, batches, path = prepare()

    def step():
        images = next(batches)
        loss, outputs = update(model, optimizer, images)
        write(path, images, outputs)  # guilty
        return loss

    return step


def clean():
    model, optimizer, batches, path = prepare()
    number = count(1)

    def step():
        images = next(batches)
        loss, outputs = update(model, optimizer, images)
        if next(number) % EVERY == 0:
            write(path, images, outputs)
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
