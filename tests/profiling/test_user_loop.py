"""steplab.profile: one call around a step of one's own."""

import contextlib
import csv
import ctypes
import functools
import importlib
import itertools
import re
import time
import warnings

import pytest
import torch
from torch.profiler import record_function
from torch.utils.data import dataloader

import steplab
from steplab.core import units
from steplab.core.errors import UserError
from steplab.parallel.world import join_alone
from steplab.probes import source_lines
from steplab.probes.counters import CountersProbe, NvmlReader
from steplab.probes.ran import LOG_ERRORS, LOG_LEVEL
from steplab.profiling.user_loop import readable_name
from steplab.store import Store
from tests.probes.fake_nvml import fake_nvml


class Loop:
    """Somebody's training step."""

    def __init__(self):
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.calls = 0

    def step(self):
        self.calls += 1
        with record_function("forward"):
            loss = self.model(torch.ones(4, 8)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_a_run_is_returned_and_stored(store, capsys):
    loop = Loop()
    run = steplab.profile(loop.step, steps=2, warmup=1, store=store)
    assert run == store.load("last")
    assert run.spec.workload == "Loop.step" and run.status == "ok"
    assert len(run.clock.step) == 20 and len(run.profile.budget.steps) == 2
    assert "-Loop-step-" in run.id
    assert run.profile.memory.peak_bytes > 0
    assert {"trace_1.json.gz", "detail.json.gz", "page.html"} <= set(run.artifacts)
    assert all((store.runs / run.id / name).is_file() for name in run.artifacts)
    (row,) = csv.DictReader((store.root / "summary.csv").read_text().splitlines())
    assert row["run"] == run.id and row["workload"] == "Loop.step"
    assert not list(store.runs.glob(".draft*"))
    assert loop.calls <= 1 + 20 + 2 + 1 + 3 + 5
    assert f"the step ran {loop.calls} times" in run.notes
    assert f"Loop.step: ok, {units.milliseconds(run.clock.step.median)}" in capsys.readouterr().err


def test_the_clocks_of_the_card_are_recorded(store, monkeypatch):
    def begin(probe, subject):
        probe.reader = NvmlReader(fake_nvml(gpm=False, clock=1400)[0], "handle")

    monkeypatch.setattr(CountersProbe, "begin", begin)
    run = steplab.profile(Loop().step, steps=1, detail=False, store=store)
    held = "the card ran at 1400 of 1980 MHz at 612 W, held back by its power limit"
    assert run.counters.held_clock == held and held in run.notes
    assert "power_bound" in str(steplab.explain(run))


def test_slow_steps_are_timed_less_often(store, monkeypatch):
    monkeypatch.setattr("steplab.profiling.user_loop.TIMED_SECONDS", 0.0)
    run = steplab.profile(Loop().step, steps=2, detail=False, store=store)
    assert len(run.clock.step) == 2


def test_names_of_steps_can_be_read():
    def local():
        pass

    assert readable_name(Loop.step) == "Loop.step" == readable_name(Loop().step)
    assert readable_name(local) == "test_user_loop.local"
    assert readable_name(lambda: None) == "test_user_loop.lambda"
    assert readable_name(functools.partial(next_batch)) == "next_batch"


def test_the_phases_are_found(store):
    from steplab.trace.analyze import analyze_run

    run = steplab.profile(Loop().step, store=store.root)
    work = analyze_run(run, store.runs / run.id).work
    phases = {work.labels[code] for code in set(work.phase.tolist())}
    assert {"forward", "backward", "optimizer"} <= phases


def test_nothing_is_kept_without_a_store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = steplab.profile(Loop().step, name="mine", detail=False, store=None)
    assert run.spec.workload == "mine" and run.profile.budget.steps
    assert run.profile.detail is None
    assert not list(tmp_path.iterdir())
    assert steplab.explain(run).case.analysis is not None


def test_the_default_store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = steplab.profile(Loop().step, steps=1, detail=False)
    assert Store().load("last").id == run.id


def test_what_the_step_raises_is_raised(store):
    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        steplab.profile(fail, store=store)
    assert store.ids() == []


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"warmup": -1}])
def test_wrong_numbers_are_one_sentence(store, wrong):
    loop = Loop()
    with pytest.raises(UserError):
        steplab.profile(loop.step, store=store, **wrong)
    assert loop.calls == 0


def test_explain_takes_the_run(tmp_path, monkeypatch):
    """Importing the package of the rules does not hide the function."""
    monkeypatch.chdir(tmp_path)
    run = steplab.profile(Loop().step, steps=1)
    found = steplab.explain(run)
    importlib.import_module("steplab.findings")
    assert steplab.explain(run) == found and isinstance(found, tuple)


def next_batch():
    time.sleep(0.03)
    return torch.ones(4, 8)


def test_the_findings_of_a_loop_name_the_line_of_its_loader(store):
    """Nothing marks the fetching but its name."""
    loop = Loop()

    def step():
        loop.model(next_batch()).square().mean().backward()

    found = steplab.explain(steplab.profile(step, steps=2, store=store))
    sleeping = next_batch.__code__.co_firstlineno + 1
    assert found[0].rule == "data_stall" and f":{sleeping} (next_batch)" in found[0].claim
    assert found[0].gain_ms == pytest.approx(30, rel=0.2)
    assert "data_stall" in str(found) and "remedy:" in str(found)


def slow_mask(rows):
    time.sleep(0.03)
    return torch.ones(rows, 8)


def collate(samples):
    return slow_mask(len(samples))


def test_a_loop_that_ends_early_is_told_and_leaves_torch_as_it_was(store):
    """A loader that has no batch left raises inside a timed step."""
    untouched = dataloader._BaseDataLoaderIter.__next__
    batches = iter(dataloader.DataLoader([0] * 40, batch_size=4))
    with pytest.raises(UserError, match="ended after 10 of about 30") as told:
        steplab.profile(lambda: next(batches), store=store)
    assert "itertools.count" in told.value.suggestion
    assert dataloader._BaseDataLoaderIter.__next__ is untouched
    with pytest.raises(UserError, match="ended after 1 of about 30"):
        steplab.profile(functools.partial(next, iter([0])), store=store)


def test_torch_is_quiet_about_what_only_the_profiler_does(store):
    """Memory is freed that is older than the recording, and hooks look at compiled modules."""
    loop, levels = Loop(), set()
    compiled = torch.compile(loop.model, backend="eager")
    before = cpp_log_level().value

    def step():
        levels.add(cpp_log_level().value)
        warnings.warn("the loop's own", stacklevel=1)
        compiled(torch.ones(4, 8)).square().mean().backward()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        steplab.profile(step, store=store)
    assert {str(one.message) for one in told} == {"the loop's own"}
    assert levels == {before, LOG_ERRORS} and cpp_log_level().value == before


def cpp_log_level():
    return ctypes.c_int.in_dll(ctypes.CDLL(torch._C.__file__), LOG_LEVEL)


def test_the_line_of_a_collate_function_that_calls_is_named_too(store):
    loop = Loop()
    batches = iter(dataloader.DataLoader([0] * 400, batch_size=4, collate_fn=collate))

    def step():
        loop.model(next(batches)).square().mean().backward()

    found = steplab.explain(steplab.profile(step, steps=2, store=store))
    sleeping, calling, asking = (
        f"test_user_loop.py:{function.__code__.co_firstlineno + lines} ({function.__name__})"
        for function, lines in ((slow_mask, 1), (collate, 1), (step, 1))
    )
    assert found[0].rule == "data_stall" and sleeping in found[0].claim
    told = re.sub(r"\S*/", "", " ".join(found[0].evidence))  # the folders of files
    assert f"fetched at {sleeping}, called at {calling}" in told
    assert told.count(asking) == 1 and f"asked for at {asking}" in told


def test_the_line_that_calls_the_waste_is_named(store):
    """A frozen tower encodes what does not change: neither its lines nor torch's are to blame."""
    loop, prompts = Loop(), torch.randn(256, 256)
    tower = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))).requires_grad_(
        False
    )
    batches = itertools.cycle([torch.randn(4, 8), torch.randn(4, 8)])

    def encode():
        return tower(prompts).mean()

    def step():
        scale = encode()
        (loop.model(next(batches)).square().mean() * scale).backward()
        loop.optimizer.step()

    run = steplab.profile(step, steps=2, store=store)
    found = {one.rule: one for one in steplab.explain(run)}
    assert "constant_rebuilt" in found, run.notes
    calling, inside = step.__code__.co_firstlineno + 1, encode.__code__.co_firstlineno + 1
    said = found["constant_rebuilt"].evidence
    assert any(f"called at test_user_loop.py:{calling} (step)" in _short(one) for one in said)
    assert any(f"test_user_loop.py:{inside} (encode): " in one for one in said)


def test_values_are_followed_in_a_group_of_one(store):
    """As torchrun makes it on one device."""
    loop = Loop()
    with contextlib.ExitStack() as group:
        if not torch.distributed.is_initialized():
            join_alone()
            group.callback(torch.distributed.destroy_process_group)
        run = steplab.profile(loop.step, steps=1, store=store)
    assert run.profile.dataflow is not None


def _short(line: str) -> str:
    return line.replace("tests/profiling/", "")


def test_what_a_loop_keeps_of_its_steps_is_found(store):
    loop, kept_outputs = Loop(), []

    def step(keep: bool):
        hidden = loop.model[0](torch.ones(20_000, 8))
        loop.model[1:](hidden).square().mean().backward()
        loop.optimizer.step()
        if keep:
            kept_outputs.append(hidden)

    run = steplab.profile(lambda: step(True), steps=1, store=store)
    memory = run.profile.memory
    assert memory.kept_bytes >= 20_000 * 16 * 4 and memory.growth_bytes >= 20_000 * 16 * 4
    assert "kept_memory" in [finding.rule for finding in steplab.explain(run)]
    allocating = step.__code__.co_firstlineno + 1
    assert f"test_user_loop.py:{allocating} (step)" in memory.kept[0].line
    appending = step.__code__.co_firstlineno + 5
    held = f"test_user_loop.py:{appending} (step)"
    assert [
        place for place in memory.kept_by if place.startswith("kept_outputs, ") and held in place
    ]
    memory = steplab.profile(lambda: step(False), steps=1, store=store).profile.memory
    assert memory.kept_bytes == 0 and memory.growth_bytes == 0


def layers(count: int) -> torch.nn.Module:
    parts = [(torch.nn.Linear(32, 32), torch.nn.Sigmoid()) for _ in range(count)]
    return torch.nn.Sequential(*(part for pair in parts for part in pair))


def findings(step, store) -> dict[str, str]:
    """What is said of a loop, by rule."""
    found = steplab.explain(steplab.profile(step, steps=1, store=store))
    return {one.rule: f"{one.claim} {' '.join(one.evidence)}" for one in found}


@pytest.mark.parametrize("penalty", [False, True])
def test_a_backward_that_is_recorded_for_nothing_is_found(store, penalty, monkeypatch):
    # In one process with other tests: of a word that many files write, no line is told.
    monkeypatch.setattr(source_lines, "_user_files", lambda: [__file__])
    model = layers(6)
    weights, x_ND = list(model.parameters()), torch.randn(4000, 32)

    def step():
        loss = model(x_ND).square().mean()
        gradients = torch.autograd.grad(loss, weights, create_graph=True)
        if penalty:
            torch.stack([one.square().sum() for one in gradients]).sum().backward()

    said = findings(step, store).get("graph_memory", "")
    giving = f"test_user_loop.py:{step.__code__.co_firstlineno + 2} (step)"
    assert ("backward pass is recorded" in said) == (not penalty)
    assert (f"create_graph is given at tests/profiling/{giving}" in said) == (not penalty)


def test_micro_batches_that_wait_for_one_backward_are_found(store):
    model, x_ND = layers(4), torch.randn(4, 2000, 32)

    def loss_of(part_ND):
        return model(part_ND).square().mean()

    def step(at_once: bool):
        losses = []
        for part_ND in x_ND:
            losses.append(loss_of(part_ND))
            if not at_once:
                losses.pop().backward()
        if at_once:
            sum(losses).backward()

    calling = f"test_user_loop.py:{step.__code__.co_firstlineno + 3} (step)"
    said = findings(lambda: step(True), store)["graph_memory"]
    assert "4 forward passes live at once" in said and calling in said
    assert f"test_user_loop.py:{loss_of.__code__.co_firstlineno + 1} (loss_of)" in said
    assert "graph_memory" not in findings(lambda: step(False), store)


class Scaled(torch.nn.Module):
    """A compiled model that one attribute compiles again, and that may read a value in a loop."""

    def __init__(self, reads: bool):
        super().__init__()
        self.layers, self.reads, self.turn = layers(3), reads, 0

    def forward(self, x_ND):
        for layer in self.layers:
            x_ND = layer(x_ND)
            if self.reads and x_ND.sum().item() < 0:
                break
        return x_ND * self.turn


@pytest.mark.parametrize("reads", [False, True])
def test_what_a_loop_compiles_is_told_with_guards_breaks_and_lines(store, reads):
    """Only "the steps still compile" was said, and nothing of what a break left uncompiled."""
    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))  # of no concern to the loop
    model = Scaled(reads)
    compiled, x_ND = torch.compile(model, backend="eager"), torch.randn(200, 32)

    def step():
        model.turn += not reads
        compiled(x_ND).square().mean().backward()

    first = Scaled.forward.__code__.co_firstlineno
    run = steplab.profile(step, steps=1, store=store)
    if not reads:
        # It has been given up by now: another visit of the loop is told so, another loop is not.
        again = steplab.explain(steplab.profile(step, steps=1, store=store))
        assert any("given up" in one.claim for one in again if one.rule == "recompiles")
        other = steplab.explain(steplab.profile(Loop().step, steps=1, store=store))
        assert "recompiles" not in [one.rule for one in other]
        (found,) = (one for one in steplab.explain(run) if one.rule == "recompiles")
        said = " ".join(found.evidence)
        assert "turn == 1" in said and f"test_user_loop.py:{first + 5} (forward)" in said
        return
    (reason,) = run.compilation.breaks
    assert run.compilation.graphs == 0
    assert reason.startswith("forward left uncompiled") and f"{first + 3} (forward)" in reason
    assert "graph_breaks" not in [one.rule for one in steplab.explain(run)]
