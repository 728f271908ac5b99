"""`bench step --batch auto`: every batch tried is a Run in the store."""

import pytest

from steplab.bench.sweep import search_batches
from steplab.cli.main import main
from steplab.core import Environment, Run, RunSpec
from tests.step.test_batch_size import machine


class FakeIsolation:
    """Stands for the worker: a machine whose best batch is known."""

    def __init__(self):
        self.machine = machine(10, 1, fits=6)

    def trial(self, spec, environment, key, progress):
        progress("measuring")
        run = self.machine(spec.batch)
        return Run(f"run-{spec.batch}", spec, environment, status=run.status, clock=run.clock,
                   work=run.work, reason=run.reason)  # fmt: skip


def test_all_that_was_measured_is_kept(store):
    environment = Environment("0", "3.11", "Linux", "cpu", 2, None)
    seen, told = [], []
    found = search_batches(
        RunSpec("gpt", batch=1), store, FakeIsolation(), environment, ["steplab"],
        lambda spec, text: told.append(spec.batch), seen.append,
    )  # fmt: skip
    assert [run.spec.batch for run in seen] == told == [1, 2, 4, 8, 6]
    assert found.best.spec.batch == 6
    assert {store.load(f"run-{batch}").spec.batch for batch in told} == set(told)


@pytest.mark.parametrize("batches", [["auto", "4"], ["five"], ["-1"]])
def test_what_it_is_not(batches, capsys):
    assert main(["bench", "step", "gpt", "--device", "cpu", "--batch", *batches]) == 2
    assert "batch" in capsys.readouterr().err
