"""At the end of `--batch auto`: a larger batch, and what makes room for it."""

from dataclasses import replace
from pathlib import Path

import pytest

from steplab.core import Memory, RunSpec, Samples
from steplab.core.ladder import Check, Ladder
from steplab.techniques.recipes import parse_recipe
from steplab.tune.larger_batch import LargerBatches, SameTokens
from steplab.tune.options import GateOptions
from steplab.tune.progress import NullView, SearchClock
from steplab.tune.report import batch_line, batches_table, gate_table
from steplab.verify.remote import CandidateResult
from steplab.verify.shapes import GateShape
from tests.compare.sides import ENVIRONMENT, run_of
from tests.tune.ladders import FakeReferences, NoProcesses, World

SPEC = RunSpec("gpt", {"context": 128, "width": 64}, "tiny", batch=16)
ROOM = 64 * 2**30
WEIGHTS = 2**30
# Time of a step at each batch: a fixed part of `fixed` ms beside 1 ms a sequence; what is
# recomputed is paid by the sequence, and what is kept is a GiB of it.
SLOWER = {"blocks": 1.3, "selective": 1.04}
KEPT = {"blocks": 0.1, "selective": 0.5}


def step_ms(spec, fixed):
    how = spec.recipe.techniques.get("checkpointing", {}).get("how", "")
    return fixed + spec.batch * SLOWER.get(how, 1.0)


def measured(spec, fixed=20.0):
    how = spec.recipe.techniques.get("checkpointing", {}).get("how", "")
    peak = WEIGHTS + int(spec.batch * KEPT.get(how, 1.0) * 2**30)
    run = replace(run_of((step_ms(spec, fixed),) * 6), spec=spec)
    memory = Memory(WEIGHTS, peak, None, ROOM, "cuda allocator")
    work = replace(run.work, tokens=spec.batch * 128)
    run = replace(run, memory=memory, work=work)
    return run if peak <= ROOM else replace(run, status="oom", reason="no room", clock=None)


@pytest.fixture
def study(monkeypatch, store):
    """Return a function that runs it on simulated steps; `red` recipes compute something else."""

    def run(fixed=20.0, red="", seconds=600.0, **gate):
        class Candidate:
            def __init__(self, spec, environment, pool):
                self.spec = spec

            def open(self, shapes, references, timeout, progress):
                assert all(shape.words for shape in shapes), "the batch is not the step's"
                good = red != self.spec.recipe.techniques.get("checkpointing", {}).get("how")
                run = measured(self.spec, fixed)
                checks = (Check("gradients", good, "right" if good else "wrong"),)
                return CandidateResult(run if good else replace(run, clock=None), checks)

            def measure(self, steps, timeout):
                return Samples((step_ms(self.spec, fixed),) * steps, "ms")

            def __enter__(self):
                return self

            def __exit__(self, *exc):
                pass

        trial = "steplab.workers.trials.TrialRunner.trial"
        monkeypatch.setattr(trial, lambda self, spec, environment: measured(spec, fixed))
        monkeypatch.setattr("steplab.tune.larger_batch.RemoteCandidate", Candidate)
        monkeypatch.setattr(NoProcesses, "take", lambda self: None)
        monkeypatch.setattr("steplab.store.Store.save", lambda self, run, files=None: None)
        shapes = (GateShape("own", "", SPEC),)
        options = GateOptions("time", gate.get("limit"), shapes, Path(), NoProcesses())
        clock = SearchClock(seconds, 0.0)
        monkeypatch.setattr("steplab.tune.progress.monotonic", lambda: 0.0)
        winner = measured(SPEC, fixed)
        parts = (FakeReferences(World()), store, clock, NullView())
        return LargerBatches(winner, (), (), options, *parts).run()

    return run


def as_ladder(trials):
    return Ladder("one", SPEC, ENVIRONMENT, batches=tuple(trials))


def test_what_makes_room_pays_where_the_fixed_part_of_a_step_is_large(study):
    """62 of 64 GiB hold 48 sequences: 20 + 48 ms. Half of what is kept lets twice as many in."""
    own, *savers = study(fixed=60.0)
    assert own.batch == 48 and own.outcome == "best so far" and own.reason == "64 sequences: oom"
    found = {trial.recipe.label: trial for trial in savers}
    selective = found["checkpointing=selective"]
    assert selective.outcome == "kept" and selective.batch == 96
    per_token = {t.batch: step_ms(replace(SPEC, batch=t.batch, recipe=t.recipe), 60.0) / t.batch
                 for t in (own, selective)}  # fmt: skip
    assert selective.change.value == pytest.approx(per_token[96] / per_token[48] - 1)
    assert selective.cost == "+2 % time, -49 % memory at batch 48"
    assert selective.checks[0].passed
    line = batch_line(as_ladder((own, *savers)))
    assert line.startswith("most tokens/s at batch ") and "of the winner's at batch 48" in line
    assert len(batches_table(as_ladder((own, *savers))).rows) == len(savers) + 1
    assert "checkpointing=selective at batch 96" in str(gate_table(as_ladder(savers)).rows)


def test_recomputing_that_costs_more_than_the_batch_brings_is_not_kept(study):
    own, *savers = study(fixed=10.0)
    blocks = next(t for t in savers if t.recipe.label == "checkpointing=blocks")
    assert blocks.outcome == "no gain" and "fewer tokens a second" in blocks.reason
    assert blocks.cost.startswith("+25 % time")
    lost = [replace(trial, outcome="no gain") for trial in savers]
    line = batch_line(as_ladder((own, *lost)))
    assert line.endswith("(64 sequences: oom, and nothing that makes room for more pays)")


def test_nothing_is_recomputed_where_the_last_doubling_brought_nothing(study):
    trials = study(fixed=0.1)
    assert len(trials) == 1 and trials[0].reason.startswith("no gain beyond")
    assert batch_line(as_ladder(trials)).endswith(
        f"at batch {trials[0].batch} ({trials[0].reason})"
    )


def test_a_red_gate_is_no_gain(study):
    _, *savers = study(fixed=60.0, red="selective")
    found = {trial.recipe.label: trial for trial in savers}
    selective = found["checkpointing=selective"]
    assert selective.outcome == "red gate" and selective.change is None
    assert "gradients: wrong" in selective.reason


def test_without_time_nothing_is_tried(study):
    """A candidate takes 10 s where none has been timed: two for the winner, three for a saver."""
    assert study(seconds=19.0) == ()
    assert len(study(fixed=60.0, seconds=21.0)) == 1
    assert len(study(fixed=60.0, seconds=31.0)) > 1


def test_a_memory_limit_ends_the_doubling(study):
    own, *_ = study(fixed=60.0, limit=20 * 2**30)
    assert own.batch == 16 and own.reason == "32 sequences: oom"


def test_times_of_another_batch_are_those_of_as_many_tokens():
    class Side:
        def measure(self, steps, timeout):
            return Samples((30.0,) * steps, "ms")

    assert SameTokens(Side(), 16 / 48).measure(2, 1.0).values == (10.0, 10.0)


def test_a_compiled_step_is_offered_the_compilers_budget():
    from steplab.techniques.context import StepContext
    from steplab.tune.proposals import memory_savers

    def offered(recipe):
        run = run_of(recipe=parse_recipe(recipe).techniques, mode="full")
        return [proposal.key for proposal in memory_savers(StepContext(run, "memory"))]

    assert "checkpointing=selective" in offered("plain")
    compiled = offered("compile=loss,precision=bf16")
    assert "checkpointing=budget,checkpointing.keep=0.5" in compiled
    assert "checkpointing=selective" not in compiled and "precision=bf16" not in offered("plain")
