"""Workers that die, hang or refuse: the parent goes on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from steplab.core import Environment, RunSpec
from steplab.core.errors import MeasurementError, UserError
from steplab.workers.alternate import alternate_specs
from steplab.workers.client import Worker, WorkerLost
from steplab.workers.trials import TrialRunner
from steplab.workloads.workload import find_workload

ENVIRONMENT = Environment("0", "3.11", "Linux", "cpu", 2, None)
MODEL = """
import os, sys, time
import torch
import steplab
def make(fate: str = "live"):
    def loss(model, batch):
        print("a model that prints")
        if fate == "die":
            os.kill(os.getpid(), 9)
        if fate == "exit":
            print("the last words", file=sys.stderr, flush=True)
            os._exit(3)
        if fate == "hang":
            time.sleep(600)
        if fate == "oom":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")
        return model(batch).mean()
    def batches(size):
        while True:
            yield torch.randn(size, 4)
    return steplab.UserModel(torch.nn.Linear(4, 2), batches, loss)
"""


@pytest.fixture
def fated(tmp_path):
    path = tmp_path / "fated.py"
    path.write_text(MODEL)

    def make(fate: str, **changes) -> RunSpec:
        name = f"{path}:make"
        config = find_workload(name).resolve("", {"fate": fate})
        return RunSpec(name, config, **{"steps": 2, "warmup": 1, **changes})

    return make


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


def test_a_hanging_cell_times_out(fated):
    with TrialRunner(timeout=8) as trials:
        run = trials.trial(fated("hang"), ENVIRONMENT)
    assert run.status == "timeout" and "8 s" in run.reason


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


def test_two_live_workers_alternate(fated):
    first, second = alternate_specs(fated("live"), fated("live", batch=8), rounds=3, timeout=120)
    assert len(first) == len(second) == 3
    assert all(len(s) == 2 and min(s.values) > 0 for s in first + second)


@pytest.mark.slow
def test_a_worker_lost_in_a_comparison_is_one_sentence(fated):
    with pytest.raises(MeasurementError, match="SIGKILL"):
        alternate_specs(fated("live"), fated("die"), rounds=1, timeout=120)


def test_a_worker_that_is_gone_is_a_lost_worker():
    with Worker() as worker:
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.process.wait()
        with pytest.raises(WorkerLost, match="SIGKILL"):
            worker.call("steplab.probes.environment:capture_environment", Environment, timeout=5)


def test_workers_end_with_their_parent(tmp_path):
    """The parent is killed outright while its worker is idle: the worker goes too."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from steplab.workers.client import Worker\n"
        "worker = Worker(); print(worker.process.pid, flush=True)\n"
        "import time; time.sleep(600)\n"
    )
    source = Path(__file__).parents[2] / "src"
    environment = {**os.environ, "PYTHONPATH": str(source)}
    command = [sys.executable, "-c", script, str(source)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as parent:
        worker = int(parent.stdout.readline())
        parent.kill()
    for _ in range(100):
        if not alive(worker):
            return
        time.sleep(0.1)
    pytest.fail("the worker outlived its parent")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False
