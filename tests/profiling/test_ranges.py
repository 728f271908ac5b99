"""Names on the timeline that leave the step as it was."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from steplab.core.errors import UserError
from steplab.probes.compilation import graph_count
from steplab.profiling.ranges import (
    can_name_modules,
    check_range,
    module_ranges,
    named_range,
    nearest_path,
    outside_compiled,
)
from steplab.step.assemble import assemble, micro_batches


def ranges_of(run) -> list[str]:
    """Return the ranges that a call opens, in order."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        run()
    found = [e for e in profiler.profiler.kineto_results.events() if e.is_user_annotation()]
    return [event.name() for event in sorted(found, key=lambda event: event.start_ns())]


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_a_range_ends_with_its_exception():
    def fail():
        with pytest.raises(ZeroDivisionError), named_range("forward", on_cuda=False):
            _ = 1 / 0
        with named_range("backward", on_cuda=False):
            pass

    assert ranges_of(fail) == ["forward", "backward"]


def test_on_cuda_ranges_are_pushed_for_other_tools_too(monkeypatch):
    said = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", said.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: said.append("pop"))
    with pytest.raises(ZeroDivisionError), named_range("forward", on_cuda=True):
        with named_range("inner", on_cuda=True):
            pass
        _ = 1 / 0
    assert said == ["forward", "inner", "pop", "pop"]


def test_every_module_is_named_once_and_numerics_stay(tiny_spec):
    spec = tiny_spec()
    losses = []
    for watched in (False, True):
        step = assemble(spec)
        feed = micro_batches(step, spec)
        if watched:
            with module_ranges(step.model):
                losses.append([step(next(feed)).loss.item() for _ in range(3)])
        else:
            losses.append([step(next(feed)).loss.item() for _ in range(3)])
    assert losses[0] == losses[1]
    assert hooks(step.model) == 0
    with module_ranges(step.model):
        seen = ranges_of(lambda: step(next(feed)))
    paths = [path for path, _ in step.model.named_modules() if path]
    # The list itself computes nothing, and a loss takes the head's weight without calling it.
    called = [f"module:{path}" for path in paths if path not in ("blocks", "head")]
    assert set(called) <= set(seen) and "module:GPT" in seen
    once = [name for name in called if "rotary" not in name]
    assert all(seen.count(name) == 1 for name in once)


class Sharing(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x):
        return self.shared(x)


def test_a_shared_module_is_named_by_its_caller():
    """Three blocks own one module, which the model owns too and calls at the end."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Sequential(nn.Identity())
            self.blocks = nn.ModuleList(Sharing(self.turn) for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.turn(x)

    model = Model()
    with module_ranges(model):
        seen = ranges_of(lambda: model(torch.ones(1)))
    blocks = [f"module:blocks.{i}{part}" for i in range(3) for part in ("", ".shared", ".shared.0")]
    assert seen == ["module:Model", *blocks, "module:turn", "module:turn.0"]


def test_the_nearest_path_shares_whole_names():
    paths = ["rotary", "blocks.1.rotary", "blocks.11.rotary"]
    assert nearest_path(paths, "blocks.11.attention") == "blocks.11.rotary"
    assert nearest_path(paths, "blocks.1.attention") == "blocks.1.rotary"
    assert nearest_path(paths, "head") == nearest_path(paths, "") == "rotary"


def test_ranges_end_where_forward_is_left_by_an_exception():
    class Failing(nn.Module):
        def forward(self, x):
            raise ValueError

    model = nn.Sequential(nn.Linear(2, 2), Failing())
    with module_ranges(model), pytest.raises(ValueError):
        model(torch.ones(1, 2))
    assert hooks(model) == 0

    with module_ranges(model):
        seen = ranges_of(lambda: model[0](torch.ones(1, 2)))
    assert seen == ["module:0"]


def test_ranges_under_checkpointing():
    """Recomputation stops early by an exception; ranges must still nest."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    x = torch.ones(1, 2, requires_grad=True)

    def run():
        for _ in range(2):
            checkpoint(model, x, use_reentrant=False).sum().backward()

    with module_ranges(model):
        seen = ranges_of(run)
    assert seen.count("module:0") == 4  # forward and recomputation, twice


@pytest.mark.parametrize("scope", ["blocks", "whole"])
def test_compiled_modules_stay_as_they_are(tiny_spec, scope):
    """A range around the compiled call, none inside, and nothing is compiled again."""
    spec = tiny_spec(f"compile={scope},compile.backend=aot_eager")
    torch._dynamo.reset()
    step = assemble(spec)
    feed = micro_batches(step, spec)
    for _ in range(2):
        step(next(feed))
    before = graph_count()
    assert before and can_name_modules(step.model)
    with module_ranges(step.model):
        seen = ranges_of(lambda: step(next(feed)))
    step(next(feed))
    assert graph_count() == before
    named = {name for name in seen if name.startswith("module:")}
    blocks = {"module:blocks.0", "module:blocks.1"}
    outer = {"module:GPT", "module:embedding", "module:norm", "module:loss"}
    assert named == (blocks | outer if scope == "blocks" else {"module:GPT"})
    assert hooks(step.model) == 0


def test_nothing_inside_a_wrapped_or_compiled_forward_is_touched():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        @torch.compile(backend="eager")
        def forward(self, x):
            return self.inner(x)

    wrapped = torch.compile(nn.Linear(2, 2), backend="eager")
    model = nn.ModuleDict({"own": Own(), "wrapped": wrapped, "plain": nn.Linear(2, 2)})
    assert [path for path, _ in outside_compiled(model)] == ["", "own", "plain"]
    torch._dynamo.reset()
    x = torch.ones(1, 2)
    for module in model.values():
        module(x)
    before = graph_count()
    with module_ranges(model):
        for module in model.values():
            module(x)
    assert graph_count() == before


def test_compiled_code_of_unknown_extent_is_left_alone():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = nn.Linear(2, 2)
    assert can_name_modules(model)
    torch.compile(lambda x: model(x).sum(), backend="eager")(torch.ones(1, 2))
    assert not can_name_modules(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.parametrize("name", ["0", "module:2", "forward", "step", "Sequential", "a::b", "mine"])
def test_a_range_that_a_step_may_have_is_not_refused(name):
    check_range(name, nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))


@pytest.mark.parametrize(("name", "said"), [("0.up", "Known: "), ("module:3", "module:3")])
def test_one_that_it_cannot_have_is(name, said):
    with pytest.raises(UserError, match="no range and no module") as refused:
        check_range(name, nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    assert said in str(refused.value)
