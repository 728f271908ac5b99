"""What was switched on, and what torch.compile was given, in this process."""

import cProfile
import tracemalloc

import pytest
import torch
from torch import nn
from torch._dynamo import eval_frame

from steplab.core.run import FORCE_EAGER, MEMORY_BUDGET, PYTHON_PROFILER, TRACEMALLOC
from steplab.probes import switches
from steplab.probes.switches import NOT_CALLED, given_to_compile, switches_on


class Compiled(nn.Linear):
    """A class that no other test has."""


@pytest.fixture
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_switches_and_variables_have_their_names():
    assert "anomaly mode" not in switches_on({})
    with torch.autograd.set_detect_anomaly(True):
        assert switches_on({"CUDA_LAUNCH_BLOCKING": "1"})[0] == "anomaly mode"
    assert switches_on({"CUDA_LAUNCH_BLOCKING": "1"})[-1] == "CUDA_LAUNCH_BLOCKING=1"
    assert switches_on({"CUDA_LAUNCH_BLOCKING": "0"}) == switches_on({})


@pytest.mark.parametrize("how", [torch.compile, lambda module: module.compile() or module])
def test_a_module_that_was_given_to_compile_is_known_while_it_lives(fresh, how):
    held = how(Compiled(2, 2))
    assert held is not None and "Compiled" in given_to_compile()


def test_so_is_a_result_that_was_thrown_away(fresh, monkeypatch):
    monkeypatch.setattr(switches, "live_modules", lambda: [])
    torch.compiler.disable(Compiled(2, 2))
    assert eval_frame.cached_backends and given_to_compile() == ()
    torch.compile(Compiled(2, 2))
    assert given_to_compile() == (NOT_CALLED,)
    monkeypatch.setattr(switches, "is_written", lambda *names: False)
    assert given_to_compile() == ()  # a library's own


@pytest.mark.parametrize(
    ("graphs", "budget", "told"), [(1, 0.5, True), (1, 1, False), (0, 0, False)]
)
def test_a_compiler_that_is_told_to_keep_less(monkeypatch, graphs, budget, told):
    monkeypatch.setattr(switches, "graph_count", lambda: graphs)
    with torch._functorch.config.patch(activation_memory_budget=budget):
        assert ("activation_memory_budget=0.5" in switches_on({})) == told
        assert any(one.startswith(MEMORY_BUDGET) for one in switches_on({})) == told


def test_what_makes_all_of_python_slow():
    assert TRACEMALLOC not in switches_on({}) and PYTHON_PROFILER not in switches_on({})
    tracemalloc.start()
    try:
        assert TRACEMALLOC in switches_on({})
    finally:
        tracemalloc.stop()
    with cProfile.Profile():
        assert PYTHON_PROFILER in switches_on({})
    with torch.profiler.profile(with_stack=True):
        assert PYTHON_PROFILER not in switches_on({})


@pytest.mark.parametrize(("graphs", "told"), [(0, True), (1, False)])
def test_a_stance_that_keeps_all_from_being_compiled(monkeypatch, graphs, told):
    """Where there are graphs, it may be the one by which a step is watched."""
    monkeypatch.setattr(switches, "graph_count", lambda: graphs)
    assert FORCE_EAGER not in switches_on({})
    with torch.compiler.set_stance("force_eager"):
        assert (FORCE_EAGER in switches_on({})) == told
