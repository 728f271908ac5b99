"""`bench step --batch auto`: every batch tried is a Run in the store."""

import pytest

from steplab.bench.sweep import search_batches
from steplab.cli.main import main
from steplab.core import Environment, Run, RunSpec
from tests.step.test_batch_size import machine


class FakeTrials:
    """A machine whose best batch is known, in place of workers."""

    def __init__(self):
        self.machine = machine(10, 1, fits=6)

    def trial(self, spec, environment, key, progress):
        progress("measuring")
        run = self.machine(spec.batch)
        return Run(f"run-{spec.batch}", spec, environment, status=run.status, clock=run.clock,
                   work=run.work, reason=run.reason)  # fmt: skip


def test_everything_measured_is_kept(store):
    environment = Environment("0", "3.11", "Linux", "cpu", 2, None)
    done, announced = [], []
    found = search_batches(
        RunSpec("gpt", batch=1), store, FakeTrials(), environment, ["steplab"],
        lambda spec, text: announced.append(spec.batch), done.append,
    )  # fmt: skip
    assert [run.spec.batch for run in done] == announced == [1, 2, 4, 8, 6]
    assert found.best.spec.batch == 6
    assert {store.load(f"run-{batch}").spec.batch for batch in announced} == set(announced)


@pytest.mark.parametrize("batches", [["auto", "4"], ["five"], ["-1"]])
def test_bad_batches_are_refused(batches, capsys):
    assert main(["bench", "step", "gpt", "--device", "cpu", "--batch", *batches]) == 2
    assert "batch" in capsys.readouterr().err
