"""What one rank holds of a model that is sharded over many: nothing of it is padding."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from steplab.modules.shards import local
from steplab.parallel import sharding
from steplab.parallel.experts import shard_experts
from steplab.parallel.mesh import rank_mesh
from steplab.parallel.world import leave
from steplab.techniques.compile import find_blocks
from steplab.workloads.workload import find_workload


@pytest.fixture
def rank_zero_of(monkeypatch):
    """Make this process rank 0 of so many whose collectives do nothing; weights are not made."""

    def on_cpu(model, ranks, replicate):
        return init_device_mesh("cpu", (ranks,), mesh_dim_names=(sharding.SHARD,))

    def join(ranks):
        leave()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)

    monkeypatch.setattr(sharding, "make_mesh", on_cpu)
    yield join
    leave()


def meta_model(size):
    entry = find_workload("tsmoe")
    with torch.device("meta"):
        return entry.open(entry.resolve(size, {})).model()


def count(model):
    """Return (parameters, bytes) of routed experts on this rank, and of everything."""
    named = {name: local(p) for name, p in model.named_parameters()}
    experts = [p for name, p in named.items() if "experts.w_" in name]
    return [
        (sum(p.numel() for p in held), sum(p.nbytes for p in held))
        for held in (experts, list(named.values()))
    ]


@pytest.mark.parametrize(
    ("ranks", "size"),
    [
        *((ranks, "flagship") for ranks in (2, 3, 8, 24, 64)),
        *((ranks, "time-moe-200m") for ranks in (4, 16, 32)),
    ],
)
def test_a_rank_holds_its_share_of_the_experts_to_the_byte(rank_zero_of, ranks, size):
    rank_zero_of(ranks)
    model = meta_model(size)
    (experts, expert_bytes), (everything, all_bytes) = count(model)
    sharding.Sharded(model, find_blocks(model))
    (held_experts, held_bytes), (held, held_in_all) = count(model)
    assert (held_experts * ranks, held_bytes * ranks) == (experts, expert_bytes)
    # The rest is cut by rows, some of which are added: norms, a router of 8 rows, heads of 105.
    assert everything <= held * ranks < 1.003 * everything
    assert all_bytes <= held_in_all * ranks < 1.003 * all_bytes


@pytest.mark.parametrize(("ranks", "expert"), [(2, 2), (8, 2), (8, 8), (64, 8)])
def test_shared_out_experts_are_not_padded_either(rank_zero_of, ranks, expert):
    rank_zero_of(ranks)
    model = meta_model("flagship")
    (experts, expert_bytes), _ = count(model)
    mesh = rank_mesh("cpu", expert)
    shard_experts(model, mesh)
    sharding.Sharded(model, find_blocks(model), expert_mesh=mesh)
    (held, held_bytes), _ = count(model)
    assert (held * ranks, held_bytes * ranks) == (experts, expert_bytes)
    shapes = {tuple(local(layer.w_in_EFD).shape) for layer in sharding.routed_experts(model)}
    assert shapes == {(8 // expert, 3072 * expert // ranks, 768)}


def test_along_the_experts_it_would_be_padded(rank_zero_of, monkeypatch):
    """Else the tests above would prove nothing: torch's default holds seven times as much."""
    monkeypatch.setattr(sharding, "sharded_axis", lambda shape, ranks, shared_out=False: 0)
    rank_zero_of(64)
    model = meta_model("flagship")
    (experts, _), _ = count(model)
    sharding.Sharded(model, find_blocks(model))
    (held, _), _ = count(model)
    assert held * 64 == 8 * experts
