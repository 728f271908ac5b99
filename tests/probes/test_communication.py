from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from steplab.core.run import Collective
from steplab.probes.communication import CollectiveCounter, CommunicationProbe
from steplab.probes.probe import Subject
from steplab.step.assemble import assemble, micro_batches
from tests.parallel.ranks import run_ranks


def counted():
    """Call every kind of collective between two ranks; return what was counted."""
    x, parts = torch.ones(8), [torch.ones(8), torch.ones(8)]
    pair = dist.new_group([0, 1])
    with CollectiveCounter() as counter:
        dist.all_reduce(x)
        dist.all_reduce(x, group=pair)
        dist.all_gather(parts, x)
        dist.all_to_all_single(torch.empty(8), x)
        dist.reduce_scatter(torch.empty(8), parts)
        dist.broadcast(x, 0)
        dist.barrier()
        x + 1
    return counter.collectives()


def test_calls_and_the_bytes_of_whole_messages_are_counted():
    for found in run_ranks(counted, 2):
        assert found == (
            Collective("all-gather", 2, 1, 64),
            Collective("all-reduce", 2, 2, 64),
            Collective("all-to-all", 2, 1, 32),
            Collective("broadcast", 2, 1, 32),
            Collective("reduce-scatter", 2, 1, 64),
        )


def communication(spec):
    """Return what the probe sees of a step in this rank, and its parameters' sizes."""
    step = assemble(spec)
    subject = Subject(step, micro_batches(step, spec), spec, environment=None)
    subject.run_step()
    probe = CommunicationProbe()
    probe.inspect(subject)
    return probe.result(), [p.numel() for p in step.model.parameters()]


@pytest.mark.parametrize("also", ["", ",compile=blocks,compile.backend=eager"])
def test_a_rank_sends_its_gradients_and_holds_weights_and_moments(tiny_spec, also):
    spec = replace(tiny_spec(f"parallel=naive{also}"), ranks=2)
    for found, sizes in run_ranks(communication, 2, spec):
        reduced = next(one for one in found.collectives if one.op == "all-reduce")
        assert (reduced.calls, reduced.bytes) == (len(sizes), 4 * sum(sizes))
        assert found.held_bytes["weights"] == 4 * sum(sizes)
        # Two moments, and a step count of 4 bytes per parameter.
        assert found.held_bytes["optimizer state"] == 8 * sum(sizes) + 4 * len(sizes)
        assert found.calls > len(sizes)  # loss and metrics are gathered too


def test_a_step_that_is_not_shared_sends_nothing(tiny_spec):
    assert communication(tiny_spec("plain"))[0] is None
