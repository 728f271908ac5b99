"""Tensors that ranks share, gathered."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from steplab.modules import shards
from tests.parallel.ranks import run_ranks


def gathered(limit):
    """Return whether all tensors came back as they were, and with how many collectives."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    made = [torch.randn(shape) for shape in ((5, 3), (2, 7, 3), (1,), (4, 4), (6,))]
    made[3] = made[3].double()
    cuts = (Shard(0), Shard(1), Shard(0), Shard(0), Shard(0))
    tensors = [distribute_tensor(t, mesh, [cut]) for t, cut in zip(made, cuts, strict=True)]
    tensors[2] = made[2]  # which every rank has
    calls, gather, most = [], dist.all_gather, shards.TOGETHER_BYTES
    dist.all_gather = lambda *words, **named: calls.append(words) or gather(*words, **named)
    shards.TOGETHER_BYTES = limit
    try:
        found = list(shards.wholes(tensors))
    finally:
        dist.all_gather, shards.TOGETHER_BYTES = gather, most
    return all(torch.equal(a, b) for a, b in zip(found, made, strict=True)), len(calls)


def test_neighbors_that_are_cut_alike_are_gathered_by_one_collective():
    assert run_ranks(gathered, 2, 2**20) == [(True, 3)] * 2  # the first two; fp64; the last
    assert run_ranks(gathered, 2, 1) == [(True, 4)] * 2
