"""The batches of one's own model: what ends is started again, what is no batch is refused."""

from collections import namedtuple
from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from steplab.core.errors import UserError
from steplab.workloads.user_batches import endless_batches, to_device

CPU = torch.device("cpu")


def first(count, batches, size=2):
    return list(islice(endless_batches("mine.py:make", batches, size, CPU), count))


def loader(samples, **options):
    return lambda size: DataLoader(TensorDataset(torch.arange(samples)), size, **options)


def test_a_generator_that_ends_is_called_again():
    calls = []

    def batches(size):
        calls.append(size)
        yield from (1, 2)

    assert first(5, batches) == [1, 2, 1, 2, 1] and calls == [2, 2, 2]


def test_a_loader_and_a_list_are_read_again():
    calls = []

    def batches(size):
        calls.append(size)
        return [1, 2]

    assert first(5, batches) == [1, 2, 1, 2, 1] and calls == [2]
    found = [batch[0].tolist() for batch in first(5, loader(4))]
    assert found == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]]


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_short_last_batch_of_a_loader_is_left_out(drop_last):
    found = [batch[0].tolist() for batch in first(4, loader(5, drop_last=drop_last))]
    assert found == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_a_loader_of_an_iterable_dataset():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(torch.arange(4))

    found = first(3, lambda size: DataLoader(Stream(), size))
    assert [batch.tolist() for batch in found] == [[0, 1], [2, 3], [0, 1]]


def used_up():
    stream = iter([1, 2])
    return lambda size: stream


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        (lambda size: [], r"batches\(2\) yields no batch"),
        (lambda size: iter(()), r"batches\(2\) yields no batch"),
        (used_up(), r"ended after 1 pass .* used-up iterator.* Make a new one"),
        (lambda size: None, r"batches\(2\) returned None, not batches"),
        (lambda size: 5, r"batches\(2\) returned an object of type int, not batches"),
        (lambda size: torch.ones(size, 4), r"returned one Tensor, not many.* yield"),
        (lambda size: {"x": torch.ones(size)}, r"returned one dict, not many"),
        (lambda size: (torch.ones(size), torch.ones(size)), r"returned one tuple, not many"),
        (lambda size: TensorDataset(torch.ones(4)), r"the dataset TensorDataset.*batch_size=size"),
        (lambda size: loader(32)(8), r"a DataLoader with batch_size=8\. Write DataLoader\(dataset"),
        (loader(1), r"1 samples, too few for a batch of 2\. Use --batch 1"),
    ],
)
def test_what_is_refused(batches, words):
    with pytest.raises(UserError, match=words):
        first(4, batches)


def test_tensors_are_moved_wherever_they_are():
    @dataclass
    class Pair:
        x: torch.Tensor
        note: str

    meta, x = torch.device("meta"), torch.ones(2)
    Named = namedtuple("Named", "x y")
    moved = to_device({"a": [x, (x, Named(x, 1))], "b": Pair(x, "n"), "c": "text"}, meta)
    assert moved["a"][0].is_meta and moved["a"][1][0].is_meta and moved["a"][1][1].x.is_meta
    assert moved["b"].x.is_meta and moved["b"].note == "n" and moved["c"] == "text"
    assert to_device(SimpleNamespace(to=lambda device: device), meta) == meta
