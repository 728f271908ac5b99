"""What a rank sends by counting, against real gloo ranks: the same calls with the same bytes."""

import functools

import pytest

from steplab.core.run import Collective
from steplab.estimate.counted import count
from steplab.estimate.ledger import Sent
from steplab.parallel.experts import Exchange
from steplab.probes.communication import CollectiveCounter
from steplab.step.assemble import assemble, micro_batches
from tests.estimate.specs import H200, spec_of
from tests.parallel.ranks import run_ranks

SCHEMES = (
    *("naive", "flat", "overlap", "bucket", "ddp", "zero1", "fsdp"),
    "fsdp,parallel.reshard=false",
    "fsdp,parallel.together=2",
    "fsdp,parallel.reduce=bf16",
    *("bucket,parallel.exact=true", "fsdp,parallel.exact=true"),
)


def sent_by_ranks(specs):
    """What this rank of a real group sends in its second step of every spec."""
    found = []
    for spec in specs:
        step = assemble(spec)
        feed = micro_batches(step, spec)
        step(next(feed))
        with CollectiveCounter() as counter:
            step(next(feed))
        found.append(counter.collectives())
    return found


def in_two_pieces(specs):
    """As on a GPU, where one half of the tokens travels while the other is multiplied."""
    alone, Exchange.__call__ = Exchange.__call__, functools.partialmethod(Exchange.in_pieces, 2)
    try:
        return sent_by_ranks(specs)
    finally:
        Exchange.__call__ = alone


@functools.cache
def really_sent(ranks):
    """What rank 0 sends, by scheme: the ranks compute all of them in one call."""
    schemes = [*SCHEMES, *(["fsdp,parallel.replicate=2"] if ranks == 4 else [])]
    specs = [spec_of(f"parallel={s}", ranks, layers=2, device="cpu") for s in schemes]
    return dict(zip(schemes, run_ranks(sent_by_ranks, ranks, specs)[0], strict=True))


@pytest.mark.parametrize("ranks", [2, 4])  # all schemes in one test, so that groups start once
def test_a_fake_group_sends_the_bytes_of_real_ranks(ranks):
    real = really_sent(ranks)
    specs = {scheme: spec_of(f"parallel={scheme}", ranks, layers=2) for scheme in real}
    assert {scheme: count(spec, H200).collectives for scheme, spec in specs.items()} == real


def test_a_hybrid_sends_within_its_halves_and_between_them():
    counted = count(spec_of("parallel=fsdp,parallel.replicate=2", 4, layers=2), H200)
    assert counted.collectives == really_sent(4)["fsdp,parallel.replicate=2"]
    between = {e.stride for e in counted.entries if isinstance(e, Sent) and e.op == "all-reduce"}
    assert 2 in between  # ranks 0 and 2 hold the same shards


@pytest.mark.parametrize(("ranks", "data"), [(2, "bucket"), (4, "bucket"), (4, "fsdp")])
def test_experts_send_what_real_ranks_send_together(ranks, data):
    """Routers do not like all experts equally, so one rank sends more than another."""
    recipe = f"parallel={data},parallel.expert=2"
    spec = spec_of(recipe, ranks, "tsmoe", device="cpu")
    every = [found[0] for found in run_ranks(in_two_pieces, ranks, [spec])]
    counted = count(spec_of(recipe, ranks, "tsmoe"), H200)
    together = [
        Collective(*(one.op, one.ranks, one.calls), sum(rank[i].bytes for rank in every) // ranks)
        for i, one in enumerate(every[0])
    ]
    assert list(counted.collectives) == together
    assert any(one.op == "all-to-all" for one in together)
