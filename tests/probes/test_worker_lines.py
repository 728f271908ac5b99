"""Where the workers of a DataLoader spend their time, asked of one more worker."""

import itertools
import random
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from steplab.probes.loaders import LoaderWaits
from steplab.probes.worker_lines import worker_lines


def decoded(i):
    until = time.perf_counter() + 0.01
    while time.perf_counter() < until:
        np.sort(np.arange(1000))  # slow
    return torch.full((4,), i)


def line_of(mark):
    with open(__file__) as file:
        lines = [number for number, text in enumerate(file, 1) if text.rstrip().endswith(mark)]
    return f"tests/probes/test_worker_lines.py:{lines[0]} (decoded)"


class Images(Dataset):
    opened = 0

    def __len__(self):
        return 64

    def __getitem__(self, i):
        self.opened += 1
        return decoded(i)


class Stream(IterableDataset):
    def __iter__(self):
        yield from map(decoded, itertools.count())


class Unreadable(Images):
    def __getitem__(self, i):
        raise OSError("no such file")


@pytest.mark.parametrize("data", [Images(), Stream()], ids=["map", "stream"])
def test_the_line_in_which_workers_are(data):
    batches = iter(DataLoader(data, 4, num_workers=1))
    next(batches)
    lines = worker_lines(batches)
    assert lines[line_of("# slow")] > 0.5
    assert sum(lines.values()) <= 1


def test_nothing_of_it_reaches_the_training():
    data = Images()
    loader = DataLoader(data, 4, shuffle=True, num_workers=1)
    batches = iter(loader)
    states = torch.get_rng_state(), np.random.get_state()[1], random.getstate()
    assert worker_lines(batches)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all() and random.getstate() == states[2]
    assert data.opened == 0
    seen = torch.cat(list(batches))[:, 0]
    assert sorted(seen.tolist()) == list(range(64))


def test_a_dataset_that_fails_and_a_loader_without_workers_tell_nothing():
    good = iter(DataLoader(Images(), 4, num_workers=1))
    good._dataset = Unreadable()
    assert worker_lines(good) == {}
    assert worker_lines(iter(DataLoader(Images(), 4))) == {}


def test_only_workers_that_are_waited_for_are_asked():
    batches = iter(DataLoader(Images(), 4, num_workers=1))
    waits = LoaderWaits()
    waits.open()
    for _ in range(4):
        next(batches)
    waits.close()
    assert line_of("# slow") in waits.result().lines
    quick = iter(DataLoader(torch.ones(100, 4), 1, num_workers=1))
    next(quick)
    waits = LoaderWaits()
    waits.open()
    for _ in range(4):
        time.sleep(0.2)
        next(quick)
    waits.close()
    assert waits.result().lines == {}
