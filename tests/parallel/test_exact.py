"""`exact`: the same bits on 1, 2 and 4 ranks."""

import pytest
import torch

from steplab.parallel.tree import PairwiseSum, tree_all_reduce
from steplab.step.assemble import assemble, micro_batches
from tests.parallel.ranks import run_ranks
from tests.parallel.training import small_spec, train_steps

STEPS = 20


def train_exactly(workload, scheme, accumulate, more=""):
    """Return losses, weights and the norms that were clipped."""
    return train_steps(workload, f"parallel={scheme},parallel.exact=true{more}", accumulate, STEPS)


@pytest.fixture(scope="module")
def one_rank():
    known = {}

    def train(workload, more=""):
        if (workload, more) not in known:
            (known[workload, more],) = run_ranks(train_exactly, 1, workload, "naive", 4, more)
        return known[workload, more]

    return train


@pytest.mark.parametrize(
    ("workload", "world", "scheme"),
    [
        *(("gpt", 1, scheme) for scheme in ("ddp", "fsdp")),
        *(("gpt", 2, scheme) for scheme in ("bucket", "zero1", "fsdp")),
        *(("gpt", 4, scheme) for scheme in ("flat", "ddp", "fsdp")),
        *(("tsmoe", 2, scheme) for scheme in ("naive", "ddp", "fsdp")),
        *(("tsmoe", 4, scheme) for scheme in ("overlap", "zero1", "fsdp")),
    ],
)
def test_weights_and_losses_are_bit_equal(one_rank, workload, world, scheme):
    ranks = run_ranks(train_exactly, world, workload, scheme, 4 // world)
    assert_bit_equal(ranks, one_rank(workload))


def test_it_goes_with_16_bits_and_replicas(one_rank):
    more = ",precision=bf16-weights,optimizer=one-pass"
    for words in (more, f"{more},parallel.replicate=2"):
        found = run_ranks(train_exactly, 4, "tsmoe", "fsdp", 1, words)
        assert_bit_equal(found, one_rank("tsmoe", more))


def assert_bit_equal(ranks, one):
    for losses, weights in ranks:
        assert losses == one[0]
        for name, weight in one[1].items():
            assert torch.equal(weights[name], weight), name


def norms_of(scheme, accumulate):
    spec = small_spec("gpt", f"parallel={scheme},parallel.exact=true", accumulate)
    step = assemble(spec)
    seen, norm = [], step.parts.scheme.gradient_norm
    step.parts.scheme.gradient_norm = lambda: seen.append(norm()) or seen[-1]
    feed = micro_batches(step, spec)
    for _ in range(3):
        step(next(feed))
    return [float(value) for value in seen]


def test_norms_are_bit_equal_and_bind():
    (one,) = run_ranks(norms_of, 1, "naive", 4)
    assert min(one) > small_spec("gpt", "plain", 1).clip
    for scheme in ("ddp", "zero1", "fsdp"):
        assert run_ranks(norms_of, 4, scheme, 1) == [one] * 4


def test_without_it_the_order_shows():
    """Else the test above would prove nothing."""
    (_, one), *_ = run_ranks(train_steps, 1, "gpt", "parallel=naive", 8, STEPS)
    (_, four), *_ = run_ranks(train_steps, 4, "gpt", "parallel=naive", 2, STEPS)
    assert any(not torch.equal(four[name], weight) for name, weight in one.items())


@pytest.mark.parametrize("leaves", [1, 2, 3, 5, 6, 8])
def test_a_counter_builds_the_same_tree_from_leaves_and_from_pairs(leaves):
    torch.manual_seed(leaves)
    numbers = torch.randn(2 * leaves, 50)
    single, paired = PairwiseSum(), PairwiseSum()
    for row in numbers:
        single.add([row])
    for first, second in numbers.unflatten(0, (-1, 2)):
        paired.add([first + second])
    total = single.total()[0]
    assert torch.equal(total, paired.total()[0])
    torch.testing.assert_close(total, numbers.sum(0))
    assert not single.levels


def sum_of_ranks(size):
    rows = torch.randn(4, size, generator=torch.Generator().manual_seed(1))
    mine = rows[torch.distributed.get_rank()].clone()
    tree_all_reduce(mine)
    return torch.equal(mine, (rows[0] + rows[1]) + (rows[2] + rows[3]))


@pytest.mark.parametrize("size", [1, 4, 7, 30])
def test_ranks_are_added_in_pairs(size):
    assert run_ranks(sum_of_ranks, 4, size) == [True] * 4
