"""A model whose step ends as it is told to."""

import pytest

from steplab.core import RunSpec
from steplab.workloads.workload import requested_workload

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
        if fate == "fail":
            print("half of the weights are missing", file=sys.stderr)
            raise RuntimeError("no weights")
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
        config = requested_workload(name).resolve("", {"fate": fate})
        return RunSpec(name, config, **{"steps": 2, "warmup": 1, **changes})

    return make
