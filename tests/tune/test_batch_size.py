"""The batch that a search takes by itself, and takes again when it goes on."""

from dataclasses import replace

import pytest

from steplab.core import Memory, RunSpec
from steplab.core.errors import MeasurementError
from steplab.tune.batch_size import find_batch, forget_batch
from tests.compare.sides import ENVIRONMENT, run_of
from tests.tune.ladders import NoProcesses
from tests.tune.test_flagship_path import Listening

SPEC = RunSpec("gpt", {"context": 128, "width": 64}, "tiny")


@pytest.fixture
def measured(monkeypatch, store):
    """Batches up to 8 double the tokens per second; 64 leave no room for anybody else."""
    batches: list[int] = []

    def trial(self, spec, environment, key="", progress=None):
        batches.append(spec.batch)
        ms = 10.0 * max(1.0, spec.batch / 8)
        memory = Memory(0, spec.batch * 2**30, None, 2**36, "cuda allocator")
        run = replace(run_of((ms,) * 6), spec=spec, memory=memory)
        return replace(run, work=replace(run.work, tokens=spec.batch * 128))

    monkeypatch.setattr("steplab.workers.trials.TrialRunner.trial", trial)
    monkeypatch.setattr(NoProcesses, "take", lambda self: None)
    monkeypatch.setattr("steplab.store.Store.save", lambda self, run, files=None: None)
    return batches


def test_the_fastest_is_found_once_and_kept_until_the_ladder_is_finished(measured, store):
    said = Listening()
    asked = (SPEC, store, ENVIRONMENT)
    assert find_batch(*asked, NoProcesses(), 60.0, said) == 8
    assert measured == [1, 2, 4, 8, 16, 32] and said.lines[0].startswith("--batch auto: 8 (")
    assert find_batch(*asked, NoProcesses(), 60.0, said) == 8 and len(measured) == 6
    forget_batch(replace(SPEC, batch=8), store, ENVIRONMENT)
    assert find_batch(*asked, NoProcesses(), 60.0, said) == 8 and len(measured) == 12


def test_a_batch_that_leaves_no_room_is_none(measured, store, monkeypatch):
    monkeypatch.setattr("steplab.tune.batch_size.MAX_MEMORY", 0.06)  # of 64 GiB
    assert find_batch(SPEC, store, ENVIRONMENT, NoProcesses(), 60.0, Listening()) == 3
    assert measured == [1, 2, 4, 3]
    monkeypatch.setattr("steplab.tune.batch_size.MAX_MEMORY", 0.001)
    other = replace(SPEC, seed=7)
    with pytest.raises(MeasurementError, match="no room beside it"):
        find_batch(other, store, ENVIRONMENT, NoProcesses(), 60.0, Listening())
