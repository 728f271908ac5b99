"""Trials in workers that die, hang or refuse: the parent goes on."""

import pytest

from steplab.core import Environment, RunSpec
from steplab.core.errors import UserError
from steplab.workers.trials import TrialRunner

ENVIRONMENT = Environment("0", "3.11", "Linux", "cpu", 2, None)


@pytest.mark.slow
def test_a_sweep_survives_every_fate(fated):
    """Death, exit and out-of-memory are rows; the cell after each is measured."""
    seen = {}
    with TrialRunner(timeout=120) as trials:
        for fate in ("die", "exit", "oom", "live"):
            seen[fate] = trials.trial(fated(fate), ENVIRONMENT, "one key")
    assert {fate: run.status for fate, run in seen.items()} == {
        "die": "crashed",
        "exit": "crashed",
        "oom": "oom",
        "live": "ok",
    }
    assert "SIGKILL" in seen["die"].reason and "the last words" in seen["exit"].reason


def test_a_hanging_cell_times_out(fated, capsys):
    with TrialRunner(timeout=8) as trials:
        trials.environment()  # imports torch, which may take seconds on a busy machine
        run = trials.trial(fated("hang"), ENVIRONMENT)
    assert run.status == "timeout" and "8 s" in run.reason
    assert "a model that prints" in capsys.readouterr().err


def test_what_a_model_prints_is_shown_where_its_step_fails(fated, capsys):
    with TrialRunner(timeout=120) as trials:
        assert trials.trial(fated("live"), ENVIRONMENT).status == "ok"
        assert not capsys.readouterr().err
        assert trials.trial(fated("fail"), ENVIRONMENT).status == "failed"
    shown = capsys.readouterr().err.splitlines()
    assert "  a model that prints" in shown and "  half of the weights are missing" in shown


def test_user_errors_come_through_with_their_suggestion(tiny_spec):
    with TrialRunner() as trials, pytest.raises(UserError, match="Did you mean"):
        trials.trial(RunSpec("gtp"), ENVIRONMENT)


def test_workers_are_shared_by_key_and_replaced_after_failure(fated):
    with TrialRunner(timeout=120) as trials:
        trials.environment()
        first = trials.worker
        trials.trial(fated("live"), ENVIRONMENT, "a")
        assert trials.worker is first
        trials.trial(fated("live"), ENVIRONMENT, "b")
        assert trials.worker is not first
        trials.trial(fated("oom"), ENVIRONMENT, "b")
        assert trials.worker is None


def test_progress_is_told(tiny_spec):
    said = []
    with TrialRunner() as trials:
        trials.trial(tiny_spec(), ENVIRONMENT, progress=said.append)
    assert said[0] == "building" and said[-1] == "inspecting"
