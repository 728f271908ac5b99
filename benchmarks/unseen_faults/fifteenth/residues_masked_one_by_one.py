"""A denoising model of proteins corrupts 15 % of the residues, in the well-known way: eight of ten become
a mask, one a random residue, one stays. The collate function comes from a notebook and does so in
two nested Python loops, residue by residue, reading and writing elements of tensors.
A good finding names the collate function that corrupts tokens in a Python loop and one of its lines.
"""

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the collate function masks tokens one by one in Python loops over tensors",
    "FIX": "draw the masks for the whole batch with torch.rand and write them with torch.where",
}
BATCH, LENGTH, PROTEINS = by_device(64, 24), by_device(512, 128), by_device(20_000, 2000)
WIDTH, HEADS, LAYERS = by_device(768, 48), by_device(12, 2), by_device(8, 2)
RESIDUES, MASK, KINDS = 20, 20, 21


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.residues, self.places = nn.Embedding(KINDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, RESIDUES)

    def forward(self, ids):
        return self.head(self.norm(self.layers(self.residues(ids) + self.places.weight)))


def corrupt_in_order(rows):
    labels = torch.stack(rows)
    ids = labels.clone()
    for row in range(ids.shape[0]):
        for place in range(ids.shape[1]):
            if ids[row, place] != MASK and random.random() < 0.15:  # guilty
                kind = random.random()
                if kind < 0.8:
                    ids[row, place] = MASK
                elif kind < 0.9:
                    ids[row, place] = random.randrange(RESIDUES)
    return ids, labels


def corrupt(rows):
    labels = torch.stack(rows)
    chance = torch.rand(labels.shape)
    ids = torch.where(chance < 0.15 * 0.9, torch.randint_like(labels, RESIDUES), labels)
    return ids.masked_fill_(chance < 0.15 * 0.8, MASK), labels


def build(collate):
    model = Denoiser().to(device())
    optimizer = adamw(model)
    proteins = torch.randint(RESIDUES, (PROTEINS, LENGTH))
    on_gpu = device() == "cuda"
    loader = DataLoader(
        proteins, BATCH, shuffle=True, drop_last=True, collate_fn=collate, pin_memory=on_gpu
    )

    def endless():
        while True:
            yield from loader

    data = endless()

    def step():
        ids, labels = (part.to(device(), non_blocking=True) for part in next(data))
        with mixed():
            loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(corrupt_in_order)


def clean():
    return build(corrupt)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
