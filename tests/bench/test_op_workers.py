"""What becomes of a cell whose worker dies, hangs or reports an error."""

from dataclasses import replace

import pytest

from steplab.cli.op_bench import MEASURE_CELL
from steplab.core import Run
from steplab.core.errors import MeasurementError, UserError
from steplab.workers import trials
from steplab.workers.client import WorkerLost
from tests.bench.op_runs import MACHINE, failed, measured, specs


class FakeWorker:
    """Answers with what it is given, or raises it."""

    answers: list = []  # noqa: RUF012
    started = 0
    ranks = 1

    def __init__(self):
        FakeWorker.started += 1

    def printed(self):
        return []

    def call(self, function, returns, **arguments):
        assert function == "steplab.bench.op_cell:measure_cell" and returns is Run
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self):
        pass


@pytest.fixture
def workers(monkeypatch):
    monkeypatch.setattr(trials, "start_worker", lambda spec: FakeWorker())
    monkeypatch.setattr(FakeWorker, "started", 0)
    return FakeWorker


def statuses(workers, answers):
    workers.answers = list(answers)
    (spec,) = specs(["flash"])
    with trials.TrialRunner(600.0, MEASURE_CELL, keep_after=("ok", "unsupported")) as runner:
        return [runner.trial(spec, MACHINE).status for _ in answers]


def test_a_worker_is_kept_after_ok_and_unsupported(workers):
    (spec,) = specs(["flash"])
    answers = [measured(spec), failed(spec, "unsupported"), measured(spec)]
    assert statuses(workers, answers) == ["ok", "unsupported", "ok"]
    assert workers.started == 1


def test_a_failure_gets_a_new_worker(workers):
    (spec,) = specs(["flash"])
    lost = WorkerLost("timeout", "no answer within 1 s")
    broken = MeasurementError("AcceleratorError: illegal memory access.")
    answers = [failed(spec), lost, broken, replace(measured(spec), status="failed"), measured(spec)]
    assert statuses(workers, answers) == ["oom", "timeout", "failed", "failed", "ok"]
    assert workers.started == 5


def test_a_user_error_ends_the_sweep(workers):
    with pytest.raises(UserError, match="no such thing"):
        statuses(workers, [UserError("no such thing")])
