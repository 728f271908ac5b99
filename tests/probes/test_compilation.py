"""Dynamo with its eager backend: what is compiled is known, and nothing is generated."""

import contextlib
import types

import torch
from torch._dynamo.utils import get_compilation_metrics

from steplab.probes.compilation import CompilationProbe


def watched(step, window=lambda: None):
    """Run `step` before the window and `window` in it, between the probe's hooks."""
    subject = types.SimpleNamespace(
        on_cuda=False, run_step=step, settle_again=step, op_by_op=contextlib.nullcontext
    )
    probe = CompilationProbe()
    probe.begin(subject)
    step()
    probe.open_window(subject)
    window()
    probe.close_window(subject)
    probe.inspect(subject)
    return probe.result()


def compiled():
    return torch.compile(lambda x: x + 1, backend="eager", dynamic=False)


def test_an_eager_step_says_nothing():
    assert watched(lambda: torch.ones(2) + 1) is None


def test_recompiles_are_seen_after_many_earlier_compilations():
    """Dynamo keeps a bounded list of compilations, which earlier trials may have filled."""
    while len(get_compilation_metrics()) < 64:
        torch._dynamo.reset()
        compiled()(torch.ones(2))
    step = compiled()
    found = watched(lambda: step(torch.ones(2)), lambda: step(torch.ones(3)))
    assert (found.graphs, found.graphs_in_window) == (2, 1)
    assert len(found.recompiles) == 1 and "size" in found.recompiles[0].reason


def test_more_recompiles_than_dynamo_keeps_by_itself():
    step = compiled()
    with torch._dynamo.config.patch(recompile_limit=100):
        found = watched(lambda: [step(torch.ones(size)) for size in range(2, 72)])
    assert found.graphs == 70 and len(found.recompiles) == 69


def test_skipped_cuda_graphs_are_counted():
    from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter

    step = compiled()

    def run():
        step(torch.ones(2))
        log_cudagraph_skip_and_bump_counter("skipping cudagraphs due to cpu device")

    found = watched(run)
    assert found.cudagraph_skips == 1 and found.warm_seconds > 0
