"""A language model whose tokens are in files of 8 MB, read by a DataLoader."""

import tempfile
from pathlib import Path

import numpy as np
import steplab
import torch
from torch.utils.data import DataLoader, Dataset

from common import Decoder, adamw, my_turn, next_token_loss, pick

FAULT = {
    "NAME": "whole_file_per_sample",
    "CAUSE": "The dataset loads a whole file of 8 MB for every sample and takes 1,025 tokens of it.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": 'Map each file once, np.load(path, mmap_mode="r"), and slice the map.',
    "STYLE": "factory",
    "BATCH": 16,
    "WHY": "The step waits for its batch, whose time is np.load of complete files in __getitem__; a memory map opened once reads only the pages of the sample.",
    "GAIN_MS": None,
}
CONTEXT, VOCAB = pick(768, 16), pick(16384, 64)
FILES, TOKENS = pick(8, 2), pick(2_000_000, 2_000)


class Tokens(Dataset):
    def __init__(self, folder, maps):
        self.paths = []
        draw = np.random.default_rng(0)
        for i in range(FILES):
            self.paths.append(Path(folder) / f"shard{i}.npy")
            np.save(self.paths[-1], draw.integers(VOCAB, size=TOKENS, dtype=np.int32))
        self.maps = [np.load(p, mmap_mode="r") for p in self.paths] if maps else None

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        file, start = index % FILES, index * 7919 % (TOKENS - CONTEXT - 1)
        if self.maps:
            shard = self.maps[file]
        else:
            shard = np.load(self.paths[file])  # FAULT
        return torch.from_numpy(shard[start : start + CONTEXT + 1].astype(np.int64))


def make(maps):
    torch.manual_seed(0)
    model = Decoder(pick(1024, 32), pick(8, 1), VOCAB, CONTEXT)
    folder = tempfile.TemporaryDirectory()
    dataset = Tokens(folder.name, maps)
    dataset.folder = folder
    my_turn()
    return steplab.UserModel(
        model=model,
        batches=lambda size: DataLoader(dataset, batch_size=size),
        loss=next_token_loss,
        optimizer=adamw,
    )


def faulty():
    return make(maps=False)


def clean():
    return make(maps=True)
