"""Batches made ahead: the same ones, in the same order, and errors where they belong."""

import gc
import itertools
import os
import threading
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

import steplab
from steplab.core import Ran, RunSpec
from steplab.core.errors import Unsupported, UserError
from steplab.core.run import new_run
from steplab.probes.environment import capture_environment
from steplab.step.assemble import assemble, micro_batches
from steplab.step.prefetch import Prefetched
from steplab.step.trial import trial
from steplab.techniques.context import StepContext
from steplab.techniques.prefetch import TECHNIQUE
from steplab.techniques.recipes import parse_recipe
from steplab.workloads.user_batches import with_workers
from tests.own_models import named

CPU = torch.device("cpu")


def test_the_same_batches_in_the_same_order():
    assert list(itertools.islice(Prefetched(itertools.count(), CPU, 3), 10)) == list(range(10))


def test_a_step_sees_what_it_would_have_seen(tiny_spec):
    losses = []
    for recipe in ("plain", "prefetch=3"):
        spec = tiny_spec(recipe, accumulate=2)
        step = assemble(spec)
        feed = micro_batches(step, spec)
        losses.append([step(next(feed)).loss.item() for _ in range(3)])
    assert losses[0] == losses[1]


def test_it_is_ahead_and_no_further():
    made = []
    stream = (made.append(i) or i for i in itertools.count())
    ahead = Prefetched(stream, CPU, 2)
    for _ in range(3):
        next(ahead)
    ahead._thread.shutdown(wait=True)
    assert made == [0, 1, 2, 3, 4]


def test_what_a_batch_raises_is_raised_when_its_turn_comes():
    def stream():
        yield 1
        raise UserError("the file ended")

    ahead = Prefetched(stream(), CPU, 2)
    assert next(ahead) == 1
    with pytest.raises(UserError, match="the file ended"):
        next(ahead)


def test_an_end_is_an_end():
    assert list(Prefetched(iter([1, 2, 3]), CPU, 2)) == [1, 2, 3]


def test_the_thread_ends_with_it():
    ahead = Prefetched(itertools.count(), CPU, 2)
    next(ahead)
    (thread,) = ahead._thread._threads
    del ahead
    gc.collect()
    thread.join(5)
    assert thread not in threading.enumerate()


def test_none_ahead_is_refused():
    with pytest.raises(UserError, match="at least 1"):
        parse_recipe("prefetch=0")


class Numbers(Dataset):
    """Each sample: its number, and the process that made it."""

    def __len__(self):
        return 14

    def __getitem__(self, index):
        return torch.tensor([index, os.getpid()])


class Endless(IterableDataset):
    def __iter__(self):
        return itertools.count()


class Reversed(DataLoader):
    def __iter__(self):
        return reversed(list(super().__iter__()))


def read(loader):
    """Return the numbers of each batch, and the processes that made them."""
    batches = list(loader)
    return [b[:, 0].tolist() for b in batches], {int(pid) for b in batches for pid in b[:, 1]}


@pytest.mark.parametrize(
    "how",
    [
        {"batch_size": 4, "shuffle": True},
        {"batch_size": 4, "drop_last": True},
        {"batch_sampler": BatchSampler(SequentialSampler(range(14)), 3, drop_last=False)},
    ],
    ids=["shuffled", "whole batches", "batch sampler"],
)
def test_workers_make_the_same_batches_in_the_same_order(how):
    plain = DataLoader(Numbers(), generator=torch.Generator().manual_seed(3), **how)
    numbers, processes = read(plain)
    again = DataLoader(Numbers(), generator=torch.Generator().manual_seed(3), **how)
    found = with_workers("here", again, 2, pinned=False)
    assert processes == {os.getpid()}
    by_workers, processes = read(found)
    assert by_workers == numbers
    assert len(processes) == 2 and os.getpid() not in processes
    assert read(found)[1] == processes, "they stay for the next epoch"


@pytest.mark.parametrize(
    ("batches", "reason"),
    [
        (iter([torch.ones(2)]), "a DataLoader"),
        (DataLoader(Endless(), batch_size=2), "each worker reads everything"),
        (Reversed(Numbers(), batch_size=2), "torch's own DataLoader, not Reversed"),
    ],
)
def test_what_workers_would_read_wrongly_is_refused(batches, reason):
    with pytest.raises(Unsupported, match=f"prefetch.workers=2.*{reason}"):
        with_workers("here", batches, 2, pinned=False)


def test_a_workload_without_a_loader_has_no_workers(tiny_spec):
    with pytest.raises(Unsupported, match="models of your own"):
        assemble(tiny_spec("prefetch=2,prefetch.workers=1"))
    with pytest.raises(UserError, match="workers is -1"):
        parse_recipe("prefetch.workers=-1")


def squares(model, batch):
    return model(batch[:, :1].float()).square().mean()


def test_workers_in_a_loop_of_ones_own():
    step = steplab.optimize(nn.Linear(1, 1), squares, "prefetch=2,prefetch.workers=2")
    loader = DataLoader(Numbers(), batch_size=4)
    epochs = []
    for _ in range(2):
        epochs.append(read(step.batches(loader)))
    assert epochs[0] == epochs[1] and epochs[0][0] == read(loader)[0]
    assert os.getpid() not in epochs[0][1] and len(epochs[0][1]) == 2
    with pytest.raises(Unsupported, match="a DataLoader"):
        step.batches([torch.ones(4, 2)])


def test_an_epoch_that_is_left_early_disturbs_no_later_one():
    step = steplab.optimize(nn.Linear(1, 1), squares, "prefetch=3,prefetch.workers=2")
    loader = DataLoader(Numbers(), batch_size=2)
    for _ in range(3):
        left = step.batches(loader)
        assert [int(next(left)[0, 0]) for _ in range(2)] == [0, 2]
    assert read(step.batches(loader))[0] == read(loader)[0]
    with pytest.raises(UserError, match="ended this reading"):
        next(left)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_says_how_many_workers_there_were(workers):
    model = named(f"{__file__}:reading")
    recipe = parse_recipe(f"prefetch=2,prefetch.workers={workers}")
    run = trial(RunSpec(model, recipe=recipe, batch=4, steps=3, warmup=1, mode="full"))
    assert (run.status, run.reason) == ("ok", "") and run.ran.loader_workers == workers


def reading():
    """A model that reads a DataLoader."""
    return steplab.UserModel(
        nn.Linear(1, 1), lambda size: DataLoader(Numbers(), batch_size=size), squares
    )


def test_tune_suggests_workers_where_the_loader_has_none():
    run = new_run(RunSpec("gpt"), replace(capture_environment(), cores=16))
    without, beside = (replace(run, ran=Ran(loader_workers=n)) for n in (None, 0))
    (thread,) = TECHNIQUE.suggest(StepContext(without), {})
    assert thread.settings == {"batches": 2}
    both = TECHNIQUE.suggest(StepContext(beside), {})
    assert [one.settings for one in both] == [{"batches": 2}, {"batches": 2, "workers": 4}]
    (more,) = TECHNIQUE.suggest(StepContext(beside), {"batches": 3})
    assert more.settings == {"batches": 3, "workers": 4}
    assert TECHNIQUE.mismatch({"batches": 2, "workers": 2}, beside) == (
        "the loader had 0 workers instead of 2"
    )
