"""Workers that are gone, and workers whose parent is."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from steplab.core import Environment
from steplab.workers.client import Worker, WorkerLost

pytestmark = pytest.mark.usefixtures("started_workers")


def test_a_worker_that_is_gone_is_a_lost_worker():
    with Worker() as worker:
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.process.wait()
        with pytest.raises(WorkerLost, match="SIGKILL"):
            worker.call("steplab.probes.environment:capture_environment", Environment, timeout=5)


def test_processes_that_a_model_forks_end(monkeypatch):
    """The workers of a DataLoader close their stdin, which a thread of their parent reads."""
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    with Worker() as worker:
        assert worker.call("tests.workers.served:forked_process_ends", int, timeout=60) == 0


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
    for _ in range(600):
        if not alive(worker):
            return
        time.sleep(0.1)
    pytest.fail("the worker outlived its parent")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False
