"""What probes must know of a step that is replayed from a graph."""

from types import SimpleNamespace

import pytest
import torch

from steplab.probes.memory import unused_in_private_pools
from steplab.probes.probe import Subject
from steplab.probes.ran import RanProbe
from steplab.probes.work import count_work
from steplab.step.assemble import assemble, micro_batches
from steplab.workloads.workload import StepOutput


class FakeReplay:
    """A step that does nothing a profiler could see."""

    forgotten = 0

    def __call__(self, batches):
        return StepOutput(torch.zeros(()))

    def forget(self):
        self.forgotten += 1


def segment(pool, total, allocated):
    return {"segment_pool_id": pool, "total_size": total, "allocated_size": allocated}


def test_only_what_graphs_hold_and_counters_do_not_is_added():
    shared, graph, other = (0, 0), (0, 1), (1, 0)
    segments = [segment(shared, 100, 10), segment(graph, 50, 20), segment(other, 8, 0)]
    assert unused_in_private_pools(segments) == 38
    assert unused_in_private_pools([{"total_size": 5, "allocated_size": 1}]) == 0


def test_ops_are_counted_without_the_graph(tiny_spec):
    """A replay dispatches nothing, so counting it would find no work at all."""
    spec = tiny_spec()
    step = assemble(spec)
    subject = Subject(step, micro_batches(step, spec), spec, SimpleNamespace())
    plain = count_work(subject)
    step.graph = FakeReplay()
    assert count_work(subject).hardware == plain.hardware > 0
    assert step.graph.forgotten == 1, "it does not hold its memory meanwhile"


def test_ops_of_a_replayed_step_are_those_that_were_captured(tiny_spec):
    spec = tiny_spec("precision=bf16,optimizer=foreach")
    step = assemble(spec)
    subject = Subject(step, micro_batches(step, spec), spec, SimpleNamespace())
    probe = RanProbe()
    probe.inspect(subject)
    plain = probe.result()
    step.graph = FakeReplay()
    probe.inspect(subject)
    assert probe.result() == plain and plain.matmul_dtypes and plain.optimizer == "foreach"


@pytest.mark.gpu
def test_the_pool_of_a_graph_is_seen_by_the_allocator():
    x = torch.ones(1 << 22, device="cuda")
    before = unused_in_private_pools(torch.cuda.memory_snapshot())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = (x + 1) * 2
        z = y.sum()
    del y
    torch.cuda.synchronize()
    held = unused_in_private_pools(torch.cuda.memory_snapshot()) - before
    assert held >= x.nbytes and z.numel() == 1
