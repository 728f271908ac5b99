"""Land cover is learned from few labeled crops of a satellite scene and very many unlabeled ones, by
consistency of two views. The batch without labels is fetched by `next(iter(loader))`, as one finds
it in repositories of this kind: each step begins a new epoch, so the sampler shuffles all positions
of the scene and makes a list of them, for one batch.
A good finding names the iterator that is made anew for each batch (the shuffle of the whole data set)
and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "next(iter(loader)) in each step shuffles the whole data set for a single batch",
    "FIX": "make the iterator once and a new one only when it is exhausted",
}
BATCH, CROP, BANDS = by_device(256, 24), by_device(64, 32), 4
SCENE, STRIDE = by_device(8192, 1024), by_device(4, 2)
WIDTH, LAYERS, COVERS = by_device(256, 24), by_device(6, 3), 10


class Crops(torch.utils.data.Dataset):
    """All crops of a scene."""

    def __init__(self):
        self.scene = torch.randn(BANDS, SCENE, SCENE)
        self.places = (SCENE - CROP) // STRIDE

    def __len__(self):
        return self.places**2

    def __getitem__(self, i):
        y, x = i // self.places * STRIDE, i % self.places * STRIDE
        return self.scene[:, y : y + CROP, x : x + CROP]


class Cover(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Conv2d(BANDS, WIDTH, 3, stride=2, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, COVERS)

    def forward(self, crops):
        x = F.relu(self.start(crops))
        for layer in self.layers:
            x = x + F.relu(layer(x))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)).float()


def again_and_again(loader):
    while True:
        yield next(iter(loader))  # guilty


def epoch_by_epoch(loader):
    while True:
        yield from loader


def build(batches_of):
    model = Cover().to(device())
    optimizer = adamw(model)
    loader = torch.utils.data.DataLoader(
        Crops(), BATCH, shuffle=True, drop_last=True, pin_memory=device() == "cuda"
    )
    unlabeled = batches_of(loader)
    labeled = in_turn(
        lambda: (
            torch.randn(BATCH // 4, BANDS, CROP, CROP, device=device()),
            torch.randint(COVERS, (BATCH // 4,), device=device()),
        )
    )

    def step():
        crops, covers = next(labeled)
        plain = next(unlabeled).to(device(), non_blocking=True)
        noisy = plain.flip(-1) + 0.2 * torch.randn_like(plain)
        images = torch.cat((crops, plain, noisy))
        with mixed():
            known, view, other = model(images).split([len(crops), BATCH, BATCH])
        loss = F.cross_entropy(known, covers) + F.mse_loss(view.softmax(-1), other.softmax(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def faulty():
    return build(again_and_again)


def clean():
    return build(epoch_by_epoch)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
