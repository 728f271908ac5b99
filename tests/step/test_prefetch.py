"""Batches made ahead: the same ones, in the same order, and errors where they belong."""

import gc
import itertools
import threading

import pytest
import torch

from steplab.core.errors import UserError
from steplab.step.assemble import assemble, micro_batches
from steplab.step.prefetch import Prefetched
from steplab.techniques.recipes import parse_recipe

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
