"""The schedule is honored exactly, and what is recorded has the names that analysis reads."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from steplab.probes.environment import capture_environment
from steplab.probes.probe import Subject
from steplab.profiling.plan import ProfilePlan
from steplab.profiling.recorder import (
    Pace,
    cuda_graphs_off,
    profile_spec,
    record_detail,
    record_lean,
)
from steplab.step.assemble import assemble, micro_batches
from steplab.trace.analyze import analyze_run
from steplab.trace.kernel_table import phases_by_time
from tests.profiling.recorded import events, named, ranges


class Counted:
    """A step that counts its calls."""

    def __init__(self, step):
        self.step = step
        self.calls = 0

    def __getattr__(self, name):
        return getattr(self.step, name)

    def __setattr__(self, name, value):
        if name == "watch":
            self.step.watch = value
        else:
            super().__setattr__(name, value)

    def __call__(self, batches):
        self.calls += 1
        return self.step(batches)


@pytest.fixture
def subject(tiny_spec):
    counters.clear()  # as a trial does: where something was compiled, modules may have no ranges
    spec = tiny_spec()
    step = assemble(spec)
    return Subject(Counted(step), micro_batches(step, spec), spec, capture_environment())


@pytest.mark.parametrize(
    ("schedule", "numbers"),
    [
        ((1, 2, 3, 1), [[3, 4, 5]]),
        ((2, 3, 3, 2), [[5, 6, 7], [13, 14, 15]]),
        ((0, 0, 1, 2), [[0], [1]]),
    ],
)
def test_the_schedule_is_honored(subject, tmp_path, schedule, numbers):
    plan = ProfilePlan(schedule)
    names = record_lean(subject, plan, tmp_path, lambda text: None)
    assert subject.step.calls == plan.steps
    assert names == tuple(f"trace_{i + 1}.json.gz" for i in range(len(numbers)))
    for name, steps in zip(names, numbers, strict=True):
        assert named(tmp_path / name, "ProfilerStep") == [f"ProfilerStep#{n}" for n in steps]
    averages = (tmp_path / "key_averages.txt").read_text()
    recorded = sum(map(len, numbers))
    line = next(text for text in averages.splitlines() if "ProfilerStep*" in text)
    assert line.split()[-1] == str(recorded), "the table holds the active steps of all cycles"
    assert not list(tmp_path.glob("*.json"))


def test_a_lean_trace_has_phases_and_nothing_that_costs(subject, tmp_path):
    before = subject.step.watch
    (name,) = record_lean(subject, ProfilePlan((0, 1, 1, 1)), tmp_path, lambda text: None)
    seen = ranges(tmp_path / name)
    own = [n for n in seen if "#" not in n]
    assert own == ["step", "data", "forward", "backward", "clip", "optimizer"]
    assert subject.step.watch is before
    kinds = {event.get("cat") for event in events(tmp_path / name)}
    assert "cpu_op" in kinds and not {"python_function", "cpu_instant_event"} & kinds
    assert not any("Input Dims" in event.get("args", {}) for event in events(tmp_path / name))


def test_a_detailed_trace_has_stacks_shapes_memory_and_modules(subject, tmp_path):
    name = record_detail(subject, tmp_path, lambda text: None)
    assert subject.step.calls == 2
    path = tmp_path / name
    assert named(path, "ProfilerStep") == ["ProfilerStep#1"]
    assert "module:blocks.1.attention.q" in ranges(path)
    kinds = {event.get("cat") for event in events(path)}
    assert {"cpu_op", "python_function", "cpu_instant_event"} <= kinds
    products = [e for e in events(path) if e["name"] == "aten::mm"]
    assert products and all(len(e["args"]["Input Dims"][0]) == 2 for e in products)


def test_the_host_is_held_one_step_ahead(monkeypatch):
    """After issuing step n it waits for step n - 1, and for nothing without a GPU."""
    said = []

    class Event:
        made = 0

        def __init__(self):
            Event.made += 1
            self.number = Event.made

        def record(self):
            said.append(f"issued {self.number}")

        def synchronize(self):
            said.append(f"done {self.number}")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    Pace(on_cuda=False).step_issued()
    pace = Pace(on_cuda=True)
    for _ in range(3):
        pace.step_issued()
    assert said == ["issued 1", "issued 2", "done 1", "issued 3", "done 2"]


@pytest.mark.gpu
def test_gpu_kernels_belong_to_the_phases_that_launched_them(tiny_spec, tmp_path):
    spec = tiny_spec("precision=bf16", device="cuda", config={"width": 128})
    run = profile_spec(spec, ProfilePlan((0, 1, 2, 1)), tmp_path, lambda text: None)
    assert run.status == "ok", run.reason
    analysis = analyze_run(run, tmp_path)
    assert analysis.budget.on_device and analysis.budget.typical.terms["kernels"] > 0
    assert {"forward", "backward", "clip", "optimizer"} <= set(phases_by_time(analysis))
    modules = {analysis.work.labels[code] for code in set(analysis.work.module.tolist())}
    assert "blocks.1.feed_forward.down" in modules


class Double(nn.Module):
    def forward(self, x):
        return x * 2


def test_inductor_is_asked_for_no_graphs(monkeypatch):
    asked = []

    def compile_fx(graph, inputs, config_patches, **others):
        asked.append(config_patches.get("triton.cudagraphs"))
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    torch._dynamo.reset()
    model = Double()
    model.compile(mode="reduce-overhead")
    x = torch.ones(1, 2)
    model(x)
    with cuda_graphs_off():
        model(x)
    model(x)
    assert asked == [True, False, True]
    torch._dynamo.reset()


def test_the_compiler_is_put_back_after_a_failure():
    original = torch._TorchCompileInductorWrapper.__call__
    with pytest.raises(ZeroDivisionError), cuda_graphs_off():
        _ = 1 / 0
    assert torch._TorchCompileInductorWrapper.__call__ is original


@pytest.mark.gpu
def test_gpu_detail_has_a_launch_for_every_kernel(tiny_spec, tmp_path):
    recipe = "precision=bf16,compile=blocks,compile.mode=reduce-overhead"
    spec = tiny_spec(recipe, device="cuda", config={"width": 128})
    run = profile_spec(spec, ProfilePlan((0, 1, 1, 1)), tmp_path, lambda text: None)
    assert run.status == "ok", run.reason

    def names(file, category):
        return sorted(e["name"] for e in events(tmp_path / file) if e.get("cat") == category)

    lean, detail = names("trace_1.json.gz", "kernel"), names("detail.json.gz", "kernel")
    assert "cudaGraphLaunch" in names("trace_1.json.gz", "cuda_runtime")
    assert "cudaGraphLaunch" not in names("detail.json.gz", "cuda_runtime")
    fused = [name for name in lean if name.startswith("triton_")]
    assert fused and fused == [name for name in detail if name.startswith("triton_")]
