"""Settings that must be in place before torch and triton are imported."""

import gc
import multiprocessing.util
import os
import random
import re
import signal
import tempfile

# Under nohup, and in the background of a script, the tests' processes would ignore these, and tests
# that send them would wait for nothing.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
# Several processes test side by side, and the tests' tensors are tiny: more threads only wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp(prefix="steplab-inductor-"))

from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from steplab.core import Recipe, RunSpec
from steplab.store import Store
from steplab.techniques.recipes import parse_recipe
from steplab.workers import client
from steplab.workloads.workload import find_workload
from tests.forked import ForkedWorker

START_PROGRAM = client.start_program
# Two threads on a busy two-core machine wait for each other longer than they compute.
torch.set_num_threads(1)

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a bare source tree, as for the GPU tests
    pass
else:
    # How long a busy machine takes to draw an example says nothing about the code. A commit is
    # judged by the same examples each time; `--hypothesis-profile drawn` looks for new ones.
    patient = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("drawn", **patient)
    settings.register_profile("repeatable", derandomize=True, **patient)
    settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU, and torch sees none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each process whole runs of neighbors, and what others have left when it is done.

    Neighbors share fixtures, and no process waits at the end while another has ten tests queued.
    """
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.option.dist == "load" else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Begin every test, its fixtures too, with the same random numbers, whatever ran before."""
    random.seed(0)
    np.random.seed(0)
    torch.random.default_generator.manual_seed(0)


def pytest_collection_finish() -> None:
    # Steps call gc.collect, which would look through thousands of tests and modules, 0.3 s a time.
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # Triton says at the end what has not been freed


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip files that need a package which a bare tree lacks, but only where `-m gpu` is asked for.

    A machine with a GPU may have torch, numpy and pytest and nothing else; in any other run a
    missing package is an error.
    """
    report = yield
    if report.failed and collector.config.option.markexpr == "gpu":
        missing = re.search(r"No module named '(\w+)", str(report.longrepr))
        if missing and missing[1] not in ("steplab", "torch", "numpy"):
            report.outcome = "skipped"
            report.longrepr = (str(collector.path), 0, f"Skipped: needs {missing[1]}")
    return report


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in the test's own folder: `train` stores its Run in the folder it is started in."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session", autouse=True)
def forked_workers() -> Generator[None, None, None]:
    """Fork the workers of all tests, which takes 0.1 s instead of three."""
    multiprocessing.util.get_temp_dir()  # for its socket, before a test looks at temporary files
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():  # a device is better met by a process of its own
            patch.setattr(client, "start_program", ForkedWorker)
        yield


@pytest.fixture
def started_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the workers of a test as users do."""
    monkeypatch.setattr(client, "start_program", START_PROGRAM)


@pytest.fixture(scope="module")
def tests_are_importable() -> Generator[None, None, None]:
    """Let worker processes find the functions of tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
        yield


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def tiny_spec():
    """Make a spec of a very small GPT; keyword arguments change the spec or the config."""

    def make(recipe: str | Recipe = "plain", config: dict | None = None, **changes) -> RunSpec:
        entry = find_workload("gpt")
        small = {"width": 32, "ff_width": 64, "layers": 2, "heads": 2, "context": 16}
        chosen = recipe if isinstance(recipe, Recipe) else parse_recipe(recipe)
        resolved = entry.resolve("tiny", {**small, "vocab_size": 64, **(config or {})})
        fields = {"batch": 2, "steps": 3, "warmup": 1, "recipe": chosen, **changes}
        return RunSpec("gpt", resolved, "tiny", **fields)

    return make
