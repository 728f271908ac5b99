"""A profile is a trial that goes on: the same Run, with traces beside it."""

from collections import Counter

import pytest
import torch

from steplab.core import RunSpec, run_from_json, run_to_json
from steplab.core.budget import TERMS
from steplab.core.errors import Unsupported
from steplab.profiling import recorder
from steplab.profiling.output import with_budget
from steplab.profiling.plan import ProfilePlan
from steplab.profiling.recorder import profile_spec
from steplab.trace.analyze import analyze_cycles, analyze_run
from steplab.workloads.workload import find_workload


def silent(text):
    pass


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A Run with two traces of two steps, and the folder of its files."""
    small = {"layers": 2, "width": 32, "ff_width": 64, "heads": 2, "context": 16, "vocab_size": 64}
    config = find_workload("gpt").resolve("tiny", small)
    spec = RunSpec("gpt", config, "tiny", batch=2, steps=3, warmup=1)
    folder = tmp_path_factory.mktemp("files")
    return profile_spec(spec, ProfilePlan((0, 1, 2, 2)), folder, silent), folder


def test_a_profiled_run_has_everything(recorded):
    run, folder = recorded
    assert run.status == "ok", run.reason
    assert len(run.clock.step) == 3 and run.work.tokens and run.ran
    profile = run.profile
    assert profile.schedule == (0, 1, 2, 2) and profile.updated_weights == run.parameters
    assert profile.traces == ("trace_1.json.gz", "trace_2.json.gz")
    assert profile.memory.peak_bytes > 0 and "forward" in profile.memory.phases_ms
    files = {"trace_1.json.gz", "trace_2.json.gz", "detail.json.gz", "key_averages.txt"}
    assert {path.name for path in folder.iterdir()} == files


def test_the_budget_has_the_steps_of_all_traces(recorded):
    run, folder = recorded
    first, *others = analyze_cycles(run, folder)
    told = with_budget(run, first, others)
    budget = told.profile.budget
    assert [step.number for step in budget.steps] == [1, 2, 4, 5]
    assert budget.unprofiled_ms == run.clock.step.median
    assert set(budget.typical.terms) <= set(TERMS) and budget.typical.terms["kernels"] > 0
    assert run_from_json(run_to_json(told)) == told


def test_products_are_booked_to_their_phase(recorded):
    """A block has 4 + 3 weights and the head 1: one product each in forward, two in backward."""
    run, folder = recorded
    work = analyze_run(run, folder).work
    rows = zip(work.name.tolist(), work.phase.tolist(), work.step.tolist(), strict=True)
    found = Counter(
        work.labels[phase]
        for name, phase, step in rows
        if step == 1 and work.labels[name] == "aten::mm"
    )
    weights = 7 * run.spec.config["layers"] + 1
    assert found == {"forward": weights, "backward": 2 * weights}


def test_without_detail(tiny_spec, tmp_path):
    run = profile_spec(tiny_spec(), ProfilePlan((0, 0, 1, 1), detail=False), tmp_path, silent)
    assert run.profile.detail is None and run.profile.memory is None
    assert any("without warm-up" in note for note in run.notes)
    assert {path.name for path in tmp_path.iterdir()} == {"trace_1.json.gz", "key_averages.txt"}


def test_a_detail_that_does_not_fit_is_noted(tiny_spec, tmp_path, monkeypatch):
    def fail(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")

    monkeypatch.setattr(recorder, "record_detail", fail)
    run = profile_spec(tiny_spec(), ProfilePlan((0, 1, 1, 1)), tmp_path, silent)
    assert run.status == "ok" and run.profile.traces and run.profile.detail is None
    assert any("ran out of memory" in note for note in run.notes)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (Unsupported("It needs torch's own CUDA allocator."), "torch's own CUDA allocator"),
        (torch.OutOfMemoryError("CUDA out of memory."), "ran out of memory"),
    ],
)
def test_a_memory_that_cannot_be_followed_is_noted(tiny_spec, tmp_path, monkeypatch, error, told):
    def fail(subject):
        raise error

    monkeypatch.setattr(recorder, "record_memory", fail)
    run = profile_spec(tiny_spec(), ProfilePlan((0, 1, 1, 1)), tmp_path, silent)
    assert run.profile.detail and run.profile.memory is None
    assert [note for note in run.notes if note.startswith("no memory timeline") and told in note]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB"), "oom"),
        (RuntimeError("the profiler broke"), "failed"),
    ],
)
def test_failures_become_a_status(tiny_spec, tmp_path, monkeypatch, error, status):
    def fail(*args):
        raise error

    monkeypatch.setattr(recorder, "record_lean", fail)
    run = profile_spec(tiny_spec(), ProfilePlan(), tmp_path, silent)
    assert (run.status, bool(run.reason)) == (status, True)


def test_profiling_leaves_the_step_as_it_trains(tiny_spec, tmp_path):
    """The losses that follow a recording are those of a step that was never watched."""
    from steplab.probes.environment import capture_environment
    from steplab.probes.probe import Subject
    from steplab.profiling.recorder import record_detail, record_lean
    from steplab.step.assemble import assemble, micro_batches

    spec = tiny_spec()
    losses = []
    for watched in (True, False):
        step = assemble(spec)
        subject = Subject(step, micro_batches(step, spec), spec, capture_environment())
        if watched:
            record_lean(subject, ProfilePlan((0, 1, 2, 1)), tmp_path, silent)
            record_detail(subject, tmp_path, silent)
        else:
            for _ in range(5):
                subject.run_step()
        losses.append([subject.run_step().loss.item() for _ in range(2)])
    assert losses[0] == losses[1]
