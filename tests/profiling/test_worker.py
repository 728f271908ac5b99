"""Workers that record, and workers that are lost."""

import pytest

from steplab.core import RunSpec
from steplab.core.errors import UserError
from steplab.profiling.plan import PROFILE_SPEC, ProfilePlan
from steplab.workers.trials import TrialRunner
from steplab.workloads.workload import requested_workload

MODEL = """
import os, torch, steplab
def make(deadly: int = 0):
    calls = []
    def loss(model, batch):
        calls.append(batch)
        if deadly and len(calls) > deadly:  # at the 12th step it is under the profiler
            os.kill(os.getpid(), 9)
        return model(batch).mean()
    def batches(size):
        while True:
            yield torch.randn(size, 4)
    return steplab.UserModel(torch.nn.Linear(4, 2), batches, loss)
"""


@pytest.fixture
def spec(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MODEL)
    name = f"{path}:make"

    def make(deadly: int) -> RunSpec:
        config = requested_workload(name).resolve("", {"deadly": deadly})
        return RunSpec(name, config, steps=2, warmup=1)

    return make


def test_a_worker_refuses_records_and_dies(spec, tmp_path, monkeypatch):
    """One worker for all three: starting one takes seconds."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path / "files"
    folder.mkdir()
    said = []
    with TrialRunner(120, PROFILE_SPEC) as runner:
        environment = runner.environment()
        with pytest.raises(UserError, match="Did you mean"):
            runner.trial(RunSpec("gtp"), environment, plan=ProfilePlan(), folder=folder)

        options = {"plan": ProfilePlan((0, 1, 1, 1)), "folder": folder}
        run = runner.trial(spec(0), environment, progress=said.append, **options)
        assert run.status == "ok", run.reason
        for name in (*run.profile.traces, run.profile.detail):
            assert (folder / name).is_file()
        assert "tracing 2 steps" in said and said[-1] == "following values"

        run = runner.trial(spec(11), environment, plan=ProfilePlan(), folder=folder)
        assert run.status == "crashed" and "SIGKILL" in run.reason
