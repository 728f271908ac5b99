"""Waits for torch's DataLoader inside a step, and what its workers send."""

import threading

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, dataloader, default_collate

from steplab.core.run import LoaderUse
from steplab.probes import loaders as loaders_module
from steplab.probes.clock import ClockProbe
from steplab.probes.loaders import LoaderWaits, pickled_bytes
from tests.probes.test_clock import FakeSubject


class Arrays(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        return np.full(1024, i, np.float32), i


def as_list(samples):
    return samples


@pytest.fixture
def passing(monkeypatch):
    """A clock that moves by 2 ms whenever it is asked."""
    now = iter(range(0, 10_000, 2))
    monkeypatch.setattr(loaders_module, "perf_counter", lambda: next(now) / 1e3)


@pytest.mark.usefixtures("passing")
def test_a_step_that_asks_a_loader_waits_for_data():
    original = dataloader._BaseDataLoaderIter.__next__
    probe, subject = ClockProbe(LoaderWaits()), FakeSubject()
    batches = iter(DataLoader(Arrays(), 2))
    probe.open_window(subject)
    for asked in (1, 2, 0):
        with probe.fetching():
            pass
        with probe.stepping():
            for _ in range(asked):
                next(batches)
    probe.close_window(subject)
    clock = probe.result()
    assert clock.data_wait.values == pytest.approx([2, 4, 0], abs=0.5)
    assert clock.loader == LoaderUse(workers=0)
    assert dataloader._BaseDataLoaderIter.__next__ is original


@pytest.mark.usefixtures("passing")
def test_what_a_thread_fetches_ahead_is_no_wait():
    waits, batches = LoaderWaits(), iter(DataLoader(Arrays(), 2))
    waits.open()
    thread = threading.Thread(target=lambda: next(batches))
    thread.start()
    thread.join()
    waits.close()
    assert waits.waited_ms == 0 and waits.result() is None


@pytest.mark.parametrize(("collate", "piped"), [(as_list, 2 * 4096), (default_collate, 0)])
def test_arrays_of_workers_go_through_a_pipe(collate, piped):
    waits = LoaderWaits()
    waits.open()
    next(iter(DataLoader(Arrays(), 2, num_workers=1, collate_fn=collate)))
    waits.close()
    assert waits.result() == LoaderUse(workers=1, piped_bytes=piped)


@pytest.mark.parametrize("workers", [0, 1])
def test_epochs_that_are_begun_for_one_batch(workers):
    """`next(iter(loader))`, beside epochs of one batch and of three that are read to their end."""
    again = {"persistent_workers": True} if workers else {}
    loader = DataLoader(Arrays(), 4, shuffle=True, num_workers=workers, **again)
    whole = DataLoader(Arrays(), 12)
    reads = {
        "left": lambda: [next(iter(loader)) for _ in range(4)],
        "ended": lambda: [batch for _ in range(2) for batch in loader],
        "whole": lambda: [batch for _ in range(4) for batch in whole],
    }
    shares = {}
    for name, read in reads.items():
        waits = LoaderWaits()
        waits.open()
        read()
        waits.close()
        shares[name] = waits.result().left_epochs
    assert shares == {"left": 0.75, "ended": 0, "whole": 0}


def test_what_is_pickled_of_a_batch():
    batch = {"x": torch.ones(8), "y": [np.ones(2, np.float64), b"abc", "text"], "n": 3}
    assert pickled_bytes(batch) == 16 + 3 + 4
