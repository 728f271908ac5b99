"""A candidate passes the gate, is measured and stays alive; a wrong one is stopped before."""

from dataclasses import replace

import pytest
import torch

from steplab.core import Memory, RunSpec
from steplab.core.errors import MeasurementError, SteplabError, Unsupported, UserError
from steplab.core.ladder import Check
from steplab.profiling.plan import ProfilePlan
from steplab.techniques.recipes import parse_recipe
from steplab.verify import references
from steplab.verify.candidate import Candidate
from steplab.verify.judge import GROUPS, judge
from steplab.verify.numerics import load_references
from steplab.verify.references import dry_run, has_dropout, make_references
from steplab.verify.remote import CandidateResult
from steplab.verify.shapes import (
    REFUSES,
    forms_of_truth,
    shapes_to_try,
    widened,
    with_batch,
    without_dropout,
)
from tests.compare.sides import run_of
from tests.own_models import named
from tests.verify.planted import PLANTED, plant, planted_spec, wrong_scaling


def silent(text: str) -> None:
    pass


def referenced(shape, folder, *dtypes):
    for dtype in ("fp64", *dtypes):
        assert make_references(shape, dtype, folder) == ""
    return shape


def test_an_honest_candidate_is_measured_and_lives(tiny_spec, tmp_path):
    spec = tiny_spec("optimizer=fused")
    shape = referenced(shapes_to_try(spec)[0], tmp_path, "fp32")
    candidate = Candidate(spec, [shape], tmp_path)
    opened = candidate.open(silent)
    assert opened.run.status == "ok", opened.run.reason
    assert opened.run.clock is not None and len(opened.run.clock.step) == spec.steps
    assert all(check.passed for check in opened.checks)
    state = {f"optimizer {key}" for key in ("exp_avg", "exp_avg_sq", "step")}
    assert {check.name for check in opened.checks} == {*GROUPS, *state} - {"choices"}
    assert [path[:8] for path in opened.ops["attention"]] == ["blocks.0", "blocks.1"]
    assert len(candidate.measure(4)) == 4
    folder = tmp_path / "traces"
    folder.mkdir()
    run = candidate.record(opened.run, ProfilePlan((0, 1, 2, 1), detail=False), folder, silent)
    assert run.profile is not None and (folder / run.profile.traces[0]).exists()


@pytest.mark.parametrize("mode", ["infer", "forward", "forward+backward"])
def test_other_modes_compare_what_they_compute(tiny_spec, tmp_path, mode):
    spec = tiny_spec("precision=bf16", mode=mode)
    shape = referenced(shapes_to_try(spec)[0], tmp_path, "bf16")
    opened = Candidate(spec, [shape], tmp_path).open(silent)
    assert opened.run.status == "ok" and opened.run.clock is not None, opened.run.reason
    compared = {check.name for check in opened.checks}
    assert {"weights", "outputs"} <= compared and "update" not in compared
    assert ("loss" in compared) is (mode != "infer")


def test_wrong_numerics_are_never_measured(tiny_spec, tmp_path, monkeypatch):
    plant(monkeypatch, wrong_scaling)
    spec = planted_spec(tiny_spec)
    shape = referenced(shapes_to_try(spec)[0], tmp_path, "fp32")
    opened = Candidate(spec, [shape], tmp_path).open(silent)
    assert opened.run.clock is None and opened.run.status == "ok"
    assert not all(check.passed for check in opened.checks)


def test_every_shape_is_compared_and_named(tiny_spec, tmp_path):
    spec = tiny_spec("precision=bf16", batch=4)
    own, single = shapes_to_try(spec)
    other = without_dropout(with_batch(own, 3))
    for shape in (single, other):
        referenced(shape, tmp_path, "bf16")
    opened = Candidate(spec, [single, other], tmp_path).open(silent)
    words = {check.name for check in opened.checks}
    assert {"loss at batch 1", "loss at batch 3, without random draws"} <= words
    assert all(check.passed for check in opened.checks)


DROPPING = """
import torch, steplab
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x):
        return self.down(F.dropout(torch.tanh(self.up(x)), 0.3, self.training))

def make():
    def batches(size):
        while True:
            yield torch.randn(size, 8)
    return steplab.UserModel(Net(), batches, lambda m, x: (m(x) - x.sum(1)).square().mean())
"""


def test_dropout_that_nobody_can_switch_off_is_compared_by_its_statistics(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(DROPPING)
    fields = {"batch": 16, "steps": 3, "warmup": 1}
    spec = RunSpec(named(f"{tmp_path / 'own.py'}:make"), {}, **fields)
    assert has_dropout(spec)
    shape = referenced(without_dropout(shapes_to_try(spec)[0]), tmp_path, "fp32")
    opened = Candidate(spec, [shape], tmp_path).open(silent)
    assert opened.run.status == "ok" and opened.run.clock is not None, opened.run.reason
    assert "random draws" in {check.name for check in opened.checks}
    assert all(check.passed for check in opened.checks)

    def twice(parts):
        parts.model.up.register_forward_hook(lambda module, x, y: torch.dropout(y, 0.3, True))

    plant(monkeypatch, twice)
    wrong = Candidate(replace(spec, recipe=PLANTED), [shape], tmp_path).open(silent)
    assert wrong.run.clock is None


def test_a_failure_is_the_status_of_the_run(tiny_spec, tmp_path):
    spec = tiny_spec("compile=blocks,compile.mode=reduce-overhead")
    shape = referenced(shapes_to_try(spec)[0], tmp_path, "fp32")
    opened = Candidate(spec, [shape], tmp_path).open(silent)
    assert opened.run.status == "unsupported" and "CUDA" in opened.run.reason


def test_a_dry_run_tells_the_dtype_or_the_reason(tiny_spec):
    shape = shapes_to_try(tiny_spec())[0]
    assert dry_run(tiny_spec("precision=bf16"), shape) == "bf16"
    with pytest.raises(Unsupported, match="cuda"):
        dry_run(tiny_spec("impl.attention=efficient"), shape)
    assert not has_dropout(tiny_spec())


def test_references_leave_cores_to_others(tiny_spec, tmp_path, monkeypatch):
    known, seen = references.compute_reference, []

    def watched(*how):
        seen.append(torch.get_num_threads())
        return known(*how)

    monkeypatch.setattr(references, "compute_reference", watched)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        referenced(shapes_to_try(tiny_spec())[0], tmp_path)
        assert seen == [2] and torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_a_model_that_refuses_fp64_says_so_and_has_its_operators_computed_in_it(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "import torch, steplab\n"
        "from torch import nn\n"
        "class Narrow(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x.to(torch.bfloat16).float())\n"
        "def factory(width: int = 8):\n"
        "    def batches(size):\n"
        "        while True:\n"
        "            yield torch.randn(size, width)\n"
        "    loss = lambda m, x: m(x).square().mean()\n"
        "    return steplab.UserModel(Narrow(width, 1), batches, loss)\n"
    )
    shape = shapes_to_try(RunSpec(named(f"{path}:factory"), {"width": 8}))[0]
    assert make_references(shape, "fp64", tmp_path).startswith(REFUSES)
    wide = widened(shape)
    assert make_references(wide, "fp64", tmp_path) == make_references(wide, "bf16", tmp_path) == ""
    truth, *peers = load_references(tmp_path, wide.name, "bf16")
    assert all(check.passed for check in judge(peers[-1], peers, truth, ""))


COMPILED_UPDATE = """
import torch, steplab
from torch import nn

@torch.compile(backend="eager", dynamic=False, fullgraph=True)
def descend(weight, gradient, rate):
    weight.add_(gradient * -rate)

class Descent(torch.optim.Optimizer):
    def __init__(self, weights):
        super().__init__(weights, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                descend(weight, weight.grad, torch.tensor(group["lr"]))

def make():
    def batches(size):
        while True:
            yield torch.randn(size, 8)

    loss = lambda m, x: m(x).square().mean()
    make_optimizer = lambda m, **how: Descent(m.parameters())
    return steplab.UserModel(nn.Linear(8, 1), batches, loss, optimizer=make_optimizer)
"""


def test_an_update_that_compiles_itself_has_every_truth(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(COMPILED_UPDATE)
    shape = shapes_to_try(RunSpec(named(f"{path}:make"), {}))[0]
    for form in forms_of_truth(shape):
        referenced(form, tmp_path, "fp32")


def test_an_optimizer_that_is_made_without_what_a_recipe_asks_for_is_told_before_it_runs(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(COMPILED_UPDATE)
    spec = RunSpec(named(f"{path}:make"), {}, recipe=parse_recipe("optimizer=fused"))
    with pytest.raises(UserError, match=r"fused=True, which the function .* does not pass on"):
        dry_run(spec, shapes_to_try(spec)[0])


OWN = """
import torch, steplab
from torch import nn

def batches(size):
    while True:
        yield torch.randn(size, 8)

def gone():
    raise RuntimeError("the weights are gone")

def shapes():
    return steplab.UserModel(nn.Linear(8, 3), batches, lambda m, x: (m(x) - x).square().mean())

def none():
    some = lambda size: iter([])
    return steplab.UserModel(nn.Linear(8, 8), some, lambda m, x: m(x).square().mean())
"""


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("gone", r"The step fails: RuntimeError: the weights are gone \(.*own.py:10 \(gone\)\)"),
        ("shapes", r"The step fails: RuntimeError: The size of tensor a .*own.py:13"),
        ("none", "yields no batch"),
    ],
)
def test_what_fails_in_any_dtype_is_no_matter_of_fp64(tmp_path, factory, said):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    shape = shapes_to_try(RunSpec(named(f"{path}:{factory}"), {}))[0]
    with pytest.raises(SteplabError, match=said):
        make_references(shape, "fp64", tmp_path)


def test_a_dtype_in_which_nothing_runs_stops_nobody_else(tiny_spec, tmp_path, monkeypatch):
    def overflow(*how):
        raise MeasurementError("The gradients overflow at any scale: every update is skipped.")

    monkeypatch.setattr(references, "compute_reference", overflow)
    told = make_references(shapes_to_try(tiny_spec())[0], "fp16", tmp_path)
    assert "does not run in fp16" in told and "overflow at any scale" in told


def test_what_is_red_on_one_rank_is_red_for_all():
    right, wrong = Check("loss", True, "0.1 of the budget"), Check("loss", False, "too far")
    agree = Check("ranks agree", True, "")
    runs = [replace(run_of((ms,) * 3), memory=Memory(0, peak, None, None, "")) for ms, peak in
            ((10.0, 9), (20.0, 5))]  # fmt: skip
    first = CandidateResult(runs[0], (right, agree), ("a.py:1",), {"attention": ("blocks.0",)})
    second = CandidateResult(runs[1], (wrong, agree), ("a.py:1", "b.py:2"))
    merged = CandidateResult.of_ranks({0: first, 1: second})
    assert merged.checks == (wrong, agree)
    assert (merged.run.clock.step.median, merged.run.memory.peak) == (20.0, 9)
    assert len(merged.waits) == 2 and merged.ops == first.ops


def test_a_rank_without_memory_fails_the_candidate_though_the_first_says_nothing():
    failed = CandidateResult(replace(run_of(), status="oom", reason="no memory"))
    merged = CandidateResult.of_ranks({1: failed})
    assert merged.status == "oom" and merged.run.reason == "rank 1: no memory"
