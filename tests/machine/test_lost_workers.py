"""Workers killed in every stage of a search: one sentence or one failed rung, and it goes on."""

from pathlib import Path

import pytest

from steplab.core import Run, RunSpec
from steplab.core.errors import MeasurementError
from steplab.tune.folder import LadderFolder
from steplab.tune.options import TuneOptions
from steplab.tune.progress import NullView
from steplab.tune.search import tune
from steplab.verify.remote import ReferenceWorker
from steplab.workers.pool import WorkerPool
from tests.tune.ladders import ENVIRONMENT, FakeTechnique, use_techniques

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("started_workers")]
SPEC = RunSpec("gpt", {"context": 128, "width": 64}, "tiny")


class Said(NullView):
    def __init__(self):
        self.reasons = {}

    def untried(self, untried):
        self.reasons[untried.label] = untried.reason


@pytest.fixture
def climb(monkeypatch, store, tmp_path):
    """Return a function that searches, with workers that die once in each of these stages."""
    root = Path(__file__).parents[2]
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    monkeypatch.setattr("steplab.workers.client.PROGRAM", "tests.machine.stand_in_worker")
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.setenv("DEATHS", str(deaths))

    def run(techniques, *stages, view=None):
        use_techniques(monkeypatch, {name: FakeTechnique({}) for name in techniques})
        for stage in stages:
            (deaths / stage).touch()
        try:
            with ReferenceWorker() as references, WorkerPool() as pool:
                watching = (references, ENVIRONMENT, view or NullView(), pool)
                return tune(SPEC, TuneOptions(minutes=30), store, *watching)[0]
        finally:
            assert [path.name for path in deaths.iterdir()] == [], "a stage was not reached"
            assert all(isinstance(run, Run) for _, run in store.all()), "a Run cannot be read"
            (path,) = store.root.glob("ladders/*/ladder.json")
            ladder = LadderFolder(path.parent).load()
            assert {rung.run for rung in ladder.rungs} <= set(store.ids())

    return run


def outcomes(ladder, name):
    return [rung.outcome for rung in ladder.rungs if rung.technique == name]


def test_without_a_baseline_it_ends_with_one_sentence_and_the_next_call_goes_on(climb):
    # A truth that is lost is computed at a smaller shape: its process may have had no memory left.
    for stages in (["fp64", "dry-running"], ["fp64"], ["building"], ["comparing"], ["measuring"]):
        with pytest.raises(MeasurementError, match="SIGKILL"):
            climb(["quick"], *(f"{stage} plain" for stage in stages))
    ladder = climb(["quick"])
    assert outcomes(ladder, "quick") == ["kept"] and ladder.finished


def test_a_candidate_that_is_lost_costs_its_rung_alone(climb):
    """And it is tried again once another recipe has won."""
    stages, view = ("building", "comparing", "measuring", "turns"), Said()
    deaths = ["dry-running refused", *(f"{stage} {stage}" for stage in stages)]
    ladder = climb(["refused", *stages, "quick"], *deaths, view=view)
    assert "SIGKILL" in view.reasons["refused=true"]
    assert all("SIGKILL" in rung.reason for rung in ladder.rungs if rung.outcome == "failed")
    assert all(outcomes(ladder, name) == ["failed", "no gain"] for name in stages)
    assert ladder.winner.label == "quick=true" and ladder.finished and ladder.total is not None


@pytest.mark.parametrize("stage", ["turns", "tracing"])
def test_a_champion_that_is_lost_is_started_again(climb, store, stage):
    """The first rung beside it fails; the next one has a champion to be measured against."""
    ladder = climb(["first", "quick"], f"{stage} plain")
    assert outcomes(ladder, "first") == ["failed", "no gain"]
    assert outcomes(ladder, "quick") == ["kept"] and ladder.finished
    notes = [note for _, run in store.all() for note in run.notes if "SIGKILL" in note]
    assert len(notes) == (stage == "tracing")


def test_a_winner_that_is_lost_at_the_end_keeps_its_ladder(climb):
    with pytest.raises(MeasurementError, match="SIGKILL"):
        climb(["quick"], "tracing quick")
    ladder = climb(["quick"])
    assert outcomes(ladder, "quick") == ["kept"] and ladder.finished
    assert ladder.winner.label == "quick=true" and ladder.total is not None
