"""The ranks that the other tests of this folder run in."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.parallel.ranks import run_ranks


def total(number):
    tensor = torch.tensor(float(number * (dist.get_rank() + 1)))
    dist.all_reduce(tensor)
    return tensor, os.getpid()


def fail_on(rank, how):
    if dist.get_rank() == rank:
        how()
    dist.barrier()


def test_every_rank_answers_and_the_processes_stay():
    (first, one), (second, two) = run_ranks(total, 2, 10)
    assert first == second == 30
    assert {one, two} == {pid for _, pid in run_ranks(total, 2, 1)}
    assert os.getpid() not in (one, two)


def stop():
    raise ValueError("planted")


def die():
    os._exit(3)


# Who hears first of a death: the test from the dead rank, or the other rank from its connection.
@pytest.mark.parametrize(("how", "words"), [(stop, "ValueError: planted"), (die, "rank [01]")])
def test_a_rank_that_fails_is_told_and_its_group_replaced(how, words):
    with pytest.raises(RuntimeError, match=words):
        run_ranks(fail_on, 2, 1, how)
    assert run_ranks(total, 2, 1)[0][0] == 3
