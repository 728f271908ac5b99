"""A search on two ranks, with processes: every scheme passes the gate, is red, or is a row."""

import math
from pathlib import Path

import pytest

from steplab.core import RunSpec, registry
from steplab.techniques.recipes import parse_recipe, read_recipe_file
from steplab.tune.options import TuneOptions
from steplab.tune.progress import NullView
from steplab.tune.report import write_outcome
from steplab.tune.search import tune
from steplab.verify.remote import ReferenceWorker
from steplab.workers.pool import WorkerPool
from steplab.workers.ranks import start_worker
from tests.own_models import named

# Wherever this model is imported, DDP forgets to add gradients, and rank 1 dies of `overlap`.
MODEL = """
import os
import torch
import torch.distributed as dist
import steplab
from steplab.parallel import ddp, gradients

def forgotten(reduction, bucket):
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done

ddp.sum_bucket = forgotten
send = gradients.Replicated._on_gradient

def dying(self, number):
    if len(self.buckets) > 1 and dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    send(self, number)

gradients.Replicated._on_gradient = dying

def make():
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    def batches(size):
        random = torch.Generator().manual_seed(0)
        while True:
            yield torch.randn(size, 8, generator=random)
    return steplab.UserModel(model, batches, lambda model, batch: model(batch).square().mean())
"""


@pytest.mark.slow
def test_a_search_on_two_ranks_keeps_no_wrong_scheme_and_outlives_a_dead_rank(
    tmp_path, store, monkeypatch
):
    """Only schemes are tried, all of them whatever they promise, and none wins by its speed."""
    (tmp_path / "model.py").write_text(MODEL)
    names = registry.names
    monkeypatch.setattr(
        registry, "names", lambda *of: ["parallel"] if of[1] == "TECHNIQUE" else names(*of)
    )
    monkeypatch.setattr("steplab.tune.proposals.MIN_SHARE", -1.0)
    monkeypatch.setattr("steplab.tune.rung.MIN_GAIN", 1.0)
    monkeypatch.setattr("steplab.tune.climb.DETAIL_SECONDS", math.inf)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    name, recipe = named(f"{tmp_path / 'model.py'}:make"), parse_recipe("parallel=naive")
    spec = RunSpec(name, {}, batch=4, recipe=recipe, warmup=1, steps=3, ranks=2)
    pids = []

    def started():
        worker = start_worker(spec)
        pids.extend(one.process.pid for one in worker.workers)
        return worker

    with ReferenceWorker() as references, WorkerPool() as pool:
        pool.start = started
        environment = references.environment(120)
        ladder, folder = tune(
            spec, TuneOptions(minutes=60), store, references, environment, NullView(), pool
        )
    rungs = {rung.label: rung for rung in ladder.rungs}
    assert all(check.passed for check in ladder.baseline_checks)
    assert rungs["parallel=bucket"].green, rungs["parallel=bucket"].reason
    assert rungs["parallel=bucket"].outcome == "no gain"
    assert rungs["parallel=ddp"].outcome == "red gate"
    assert "too far from fp64" in rungs["parallel=ddp"].reason
    assert rungs["parallel=overlap"].outcome == "failed"
    assert "rank 1: the worker was ended by SIGKILL" in rungs["parallel=overlap"].reason
    assert ladder.finished
    write_outcome(ladder, store, folder.path, "--store")
    text = (folder.path / "recipe.toml").read_text()
    assert "2 ranks" in text and "2 ranks" in (folder.path / "report.html").read_text()
    assert read_recipe_file(folder.path / "recipe.toml") == ladder.winner
    assert pids and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not list((tmp_path / "temporary").iterdir())
