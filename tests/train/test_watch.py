"""What a rank says about ranks that are gone or hold the others up."""

import sys
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from steplab.core.errors import UserError
from steplab.parallel.world import current_world
from steplab.train.stop import Stop
from steplab.train.watch import (
    Pending,
    Standing,
    Watch,
    describe_hang,
    describe_loss,
    is_loss,
    running_line,
)
from tests.parallel.ranks import run_ranks

HOSTS = ["node1", "node1", "node2"]
WAITS = Standing(0, "node1", 6, "gradients.py:84", {"0": 9}, Pending("all_reduce", "0", 9))
STANDS = Standing(2, "node2", 6, "my_model.py:12 (loss)", {"0": 8})


def test_a_hang_names_the_rank_its_line_and_the_collective():
    second = replace(WAITS, rank=1)
    said = describe_hang({0: WAITS, 1: second, 2: STANDS}, HOSTS, 60)
    assert said == (
        "No step has ended for 60 s: rank 0 on node1 waits in all_reduce (number 9) of step 7, at "
        "gradients.py:84; rank 2 on node2 has not begun it and stands at my_model.py:12 (loss)."
    )


@pytest.mark.parametrize(
    ("standings", "said"),
    [
        ({0: WAITS, 1: replace(WAITS, rank=1)}, "rank 2 on node2 gives no answer."),
        ({0: replace(WAITS, pending=None)}, "rank 1 on node1, rank 2 on node2 gives no answer."),
        ({r: replace(WAITS, rank=r) for r in range(3)}, "all ranks wait in all_reduce"),
        (
            {r: replace(STANDS, rank=r) for r in range(3)},
            "no rank waits for another; rank 0 on node2 stands at my_model.py:12 (loss).",
        ),
    ],
)
def test_other_hangs(standings, said):
    found = describe_hang(standings, HOSTS, 60)
    assert said in found and found.count(". ") == 0


def test_a_loss_names_who_is_gone():
    assert describe_loss({0: WAITS, 2: STANDS}, HOSTS) == "rank 1 on node1 is gone"
    assert describe_loss({0: WAITS}, HOSTS) == "rank 1 on node1, rank 2 on node2 are gone"
    assert "all ranks are there" in describe_loss({0: WAITS, 1: WAITS, 2: STANDS}, HOSTS)


def test_what_counts_as_a_loss():
    assert is_loss(RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer"))
    assert is_loss(dist.DistNetworkError("recvValue failed"))
    assert not is_loss(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_loss(UserError("The gloo word alone does not make it one."))


def test_the_line_that_runs():
    assert "train/test_watch.py:" in running_line(sys._getframe())
    assert running_line(None) == "unknown"


def roll_call():
    """All ranks but the last wait in a collective, which the last enters late."""
    world = current_world()
    watch = Watch(world, Stop(), hang_timeout=1e9)
    watch.beat(4)
    value = torch.ones(1)
    if world.rank == world.size - 1:
        deadline = time.monotonic() + 20
        while not watch._has("standing 0") and time.monotonic() < deadline:
            time.sleep(0.01)
        watch._answer()
        work = dist.all_reduce(value, async_op=True)
    else:
        work = dist.all_reduce(value, async_op=True)
        watch._answer()
    work.wait()
    dist.barrier()
    standings, hosts = watch._standings(), watch._hosts()
    dist.barrier()
    firsts = watch._is_first_to_tell()
    dist.barrier()
    return describe_hang(standings, hosts, 60), firsts


def test_ranks_say_where_they_stand_and_one_of_them_tells():
    found = run_ranks(roll_call, 2)
    assert sorted(first for _, first in found) == [False, True]
    assert found[0][0] == found[1][0]
    assert "waits in all_reduce" in found[0][0] and "of step 5" in found[0][0]
    assert "rank 1 on" in found[0][0] and "has not begun it" in found[0][0]
