"""Dynamo with its eager backend: what is compiled is known, and nothing is generated."""

import contextlib
import types

import pytest
import torch
from torch._dynamo.utils import get_compilation_metrics

from steplab.probes.compilation import CompilationProbe


def watched(step, window=lambda: None, by_recipe=True):
    """Run `step` before the window and `window` in it, between the probe's hooks."""
    recipe = types.SimpleNamespace(techniques={"compile": {}} if by_recipe else {})
    subject = types.SimpleNamespace(
        on_cuda=False, run_step=step, settle_again=step, op_by_op=contextlib.nullcontext,
        spec=types.SimpleNamespace(recipe=recipe),
    )  # fmt: skip
    probe = CompilationProbe()
    probe.begin(subject)
    step()
    probe.open_window(subject)
    window()
    probe.close_window(subject)
    probe.inspect(subject)
    return probe.result()


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()


def compiled():
    return torch.compile(lambda x: x + 1, backend="eager", dynamic=False)


def test_an_eager_step_says_nothing():
    assert watched(lambda: torch.ones(2) + 1) is None


def test_recompiles_are_seen_after_many_earlier_compilations():
    """Dynamo keeps a bounded list of compilations, which earlier trials may have filled."""
    while len(get_compilation_metrics()) < 64:
        torch._dynamo.reset()
        compiled()(torch.ones(2))
    torch._dynamo.reset()
    step = compiled()
    found = watched(lambda: step(torch.ones(2)), lambda: step(torch.ones(3)))
    assert (found.graphs, found.graphs_in_window) == (2, 1)
    assert len(found.recompiles) == 1 and "size" in found.recompiles[0].reason


class Numbered(torch.nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, x):
        x = x.sin()
        return x / (self.number + 1)


def test_the_limit_of_recompilations_is_no_break():
    blocks = [Numbered(number) for number in range(12)]
    for block in blocks:
        block.compile(backend="eager")
    found = watched(lambda: [block(torch.ones(2)) for block in blocks])
    *before, last = found.recompiles
    assert not found.breaks and last.given_up and not any(one.given_up for one in before)
    line = Numbered.forward.__code__.co_firstlineno
    for one in found.recompiles:
        assert one.function == "forward" and one.reason.partition(": ")[2].startswith("self.number")
        assert one.begins.endswith(f"test_compilation.py:{line} (forward)")
        assert one.line.endswith(f"test_compilation.py:{line + 2} (forward)")


@pytest.mark.slow
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


def test_what_a_model_compiled_by_itself_is_neither_dropped_nor_compiled_again():
    """A graph that a cache brought back, or that was made under another setting, is the subject."""
    step, seen = compiled(), []
    step(torch.ones(2))
    probe_free = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    found = watched(lambda: seen.append(step(torch.ones(2))), by_recipe=False)
    assert probe_free and found is None and len(seen) == 1, "no graph was new, no step repeated"


@torch._dynamo.disable
def not_to_be_compiled(x):
    return x + 1


def branching(x):
    x = x.sin()
    if x.mean() > 1e3:
        x = x * 2
    return x.cos()


def reading(x):
    return x.cos() * int(x.sum().item())


def printing(x):
    x = x + 1
    print(end="")
    return x.cos()


def selecting(x):
    return x[x > 0].sum() + 1


def leaving(x):
    return not_to_be_compiled(x.sin()).cos()


def asked(x):
    x = x + 1
    torch._dynamo.graph_break()
    return x.cos()


BREAKS = {
    branching: ("Data-dependent branching", 2),
    reading: ("Tensor.item()", 1),
    printing: ("builtin", 2),
    selecting: ("Dynamic shape", 1),
    leaving: ("torch.compiler.disable", 1),
    asked: ("graph_break()", 2),
}


@pytest.mark.parametrize("function", BREAKS, ids=lambda function: function.__name__)
def test_every_kind_of_break_is_seen_with_its_line(function):
    step = torch.compile(function, backend="eager")
    (said, count), *more = watched(lambda: step(torch.ones(4))).breaks.items()
    word, below = BREAKS[function]
    line = function.__code__.co_firstlineno + below
    assert word in said and f"test_compilation.py:{line} ({function.__name__})" in said
    assert count == 1 and not more


def test_a_branch_in_every_layer_is_counted_in_every_layer():
    layers = [torch.nn.Linear(4, 4) for _ in range(3)]

    class Net(torch.nn.Module):
        def forward(self, x):
            x = layers[0](x)
            x = x * 2 if x.mean() > 1e3 else x
            x = layers[1](x)
            x = x * 2 if x.mean() > 1e3 else x
            return layers[2](x)

    step = torch.compile(Net(), backend="eager")
    found = watched(lambda: step(torch.ones(2, 4)))
    assert sum(found.breaks.values()) == 2 and found.graphs == 3
    assert all(said.startswith("Data-dependent branching, ") for said in found.breaks)


def test_a_function_that_is_given_up_is_a_break_too():
    """In a loop no graph can be cut, so all of it runs uncompiled."""

    def looping(x):
        for _ in range(3):
            x = x + 1
            print(end="")
        return x

    step = torch.compile(looping, backend="eager")
    found = watched(lambda: step(torch.ones(4)))
    assert found.graphs == 0 and sum(found.breaks.values()) == 1
    assert "looping left uncompiled: " in next(iter(found.breaks))


def test_a_loop_of_ones_own_was_cut_before_anybody_looked():
    apart = torch.compiler.disable(torch.sin)

    def cut(x):
        x = x + 1
        x = apart(x)
        return x + 1

    step = torch.compile(cut, backend="eager")
    step(torch.ones(4))
    probe = CompilationProbe()
    probe.begin()
    probe.open_window(None)
    step(torch.ones(4))
    probe.close_window(None)
    found = probe.result()
    (earlier,), line = found.earlier_breaks, cut.__code__.co_firstlineno + 2
    assert "torch.compiler.disable" in earlier and f"test_compilation.py:{line} (cut)" in earlier


def test_a_whole_graph_has_no_breaks():
    step = compiled()
    assert watched(lambda: step(torch.ones(2))).breaks == {}
