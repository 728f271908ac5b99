"""Training as it is used: loss falls, resume is exact, kills lose nothing."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from steplab.core.errors import MeasurementError, UserError
from steplab.data.formats.time300b import write_time300b
from steplab.train.checkpoint_files import newest_checkpoint
from steplab.train.log import TrainingLog
from steplab.train.loop import Trainer, train
from steplab.train.stop import Stop
from tests.train.tiny_runs import SHAPE, StopAfter, assert_same_state, make_spec, silent

SOURCE = Path(__file__).parents[2] / "src"


@pytest.mark.parametrize(
    "recipe",
    [
        "plain",
        "optimizer=fused",
        "precision=bf16",
        "precision=fp16,impl.experts=loop",
        "optimizer=one-pass",
        "precision=bf16-weights,optimizer=one-pass",
    ],
)
def test_20_steps_equal_10_and_resume_and_10(tmp_path, recipe):
    whole = make_spec(tmp_path / "whole", recipe, accumulate=2)
    train(whole, silent(), Stop())
    halves = make_spec(tmp_path / "halves", recipe, accumulate=2)
    outcome = train(halves, silent(), StopAfter(10))
    assert outcome.step == 10 and outcome.stopped
    outcome = train(halves, silent(), Stop(), newest_checkpoint(tmp_path / "halves"))
    assert outcome.step == 20 and not outcome.stopped
    assert_same_state(tmp_path / "whole", tmp_path / "halves", whole)


def test_loss_falls_and_is_logged(tmp_path):
    spec = make_spec(tmp_path, steps_per_epoch=60, lr=3e-3, log_every=10, validate_every=30)
    outcome = train(spec, silent(tmp_path), Stop())
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [row["train/pred"] for row in rows if "train/pred" in row]
    assert len(losses) == 6 and losses[-1] < 0.8 * losses[0]
    assert sum("val/pred" in row and "ood/pred" in row for row in rows) == 2
    assert set(outcome.metrics) >= {"loss", "pred", "aux", "val", "ood"}
    assert outcome.metrics["aux"] >= 1.0


def test_own_data(tmp_path):
    source = np.random.default_rng(0)
    series = [source.normal(size=n).cumsum().astype(np.float32) for n in (200, 90, 300, 2, 50)]
    write_time300b(tmp_path / "data" / "walks", series)
    spec = make_spec(
        tmp_path / "c", dataset_path=str(tmp_path / "data"), seq_stride=20, steps_per_epoch=5
    )
    outcome = train(spec, silent(), Stop())
    assert outcome.step == 5 and "val" not in outcome.metrics


def test_divergence_is_told_and_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    spec = make_spec(tmp_path, checkpoint_every=5, steps_per_epoch=20)
    original = Trainer._one_step

    def poisoned(self, loader):
        if self.step_number == 12:
            with torch.no_grad():
                next(self.step.model.parameters()).fill_(float("nan"))
        original(self, loader)

    monkeypatch.setattr(Trainer, "_one_step", poisoned)
    with pytest.raises(MeasurementError, match="step-00000010 is intact"):
        train(spec, silent(), Stop())
    assert newest_checkpoint(tmp_path).name == "step-00000010"


def test_data_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        train(make_spec(tmp_path, dataset_path=str(tmp_path / "nowhere")), silent(), Stop())


def test_profile_writes_a_chrome_trace(tmp_path):
    spec = make_spec(tmp_path, profile=True, steps_per_epoch=22, checkpoint_every=0)
    said = []
    train(spec, TrainingLog(said.append, None, perf=False), Stop())
    trace = json.loads((tmp_path / "profiler" / "chrome_trace.json").read_text())
    assert any("aten::" in str(event.get("name")) for event in trace["traceEvents"])
    assert any("chrome_trace.json" in line for line in said)


def train_command(folder, steps) -> list[str]:
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in SHAPE.items()]
    return [
        sys.executable,
        "-m",
        "steplab",
        "train",
        *flags,
        "--batch-size=4",
        "--log-every=1",
        f"--steps-per-epoch={steps}",
        "--checkpoint-every=1",
        "--validate-every=0",
        "--validation-batches=1",
        f"--checkpoint-dir={folder}",
        "--keep-last=2",
    ]


@pytest.mark.slow
@pytest.mark.long  # tests/machine/test_kill_campaign.py has a shorter one
def test_kills_at_random_moments_lose_nothing(tmp_path):
    """Killed several times, also while saving; the last run ends where an unbroken one does."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    steps, source = 24, random.Random(1)
    command = train_command(tmp_path / "killed", steps)
    for attempt in range(3):
        resume = ["--resume"] if newest_checkpoint(tmp_path / "killed") else []
        with subprocess.Popen(
            [*command, *resume], env=environment, stdout=subprocess.PIPE, text=True
        ) as process:
            for line in process.stdout:
                if line.startswith("step="):
                    break
            time.sleep(source.uniform(0.0, 0.25))
            process.send_signal(signal.SIGKILL if attempt < 2 else signal.SIGTERM)
    assert newest_checkpoint(tmp_path / "killed") is not None
    for folder, extra in (("killed", ["--resume"]), ("whole", [])):
        done = [*train_command(tmp_path / folder, steps), *extra]
        subprocess.run(done, env=environment, check=True, capture_output=True, timeout=120)
    spec = make_spec(tmp_path, steps_per_epoch=steps)
    assert_same_state(tmp_path / "killed", tmp_path / "whole", spec)


def test_a_signal_saves_and_exits(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [*train_command(tmp_path, 5000)]
    command[command.index("--checkpoint-every=1")] = "--checkpoint-every=4000"
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            if line.startswith("step=3"):
                break
        process.send_signal(signal.SIGTERM)
        out, error = process.communicate(timeout=60)
    assert process.returncode == 143 and "stopped by a signal" in out and error == ""
    assert newest_checkpoint(tmp_path) is not None and "next: steplab train --resume" in out


def test_weights_that_are_not_finite_are_never_saved(tmp_path):
    """The loss of the step before the update is still finite; the weights after it are not."""
    spec = make_spec(tmp_path, checkpoint_every=5)
    trainer = Trainer(spec, silent())
    trainer.step_number = 5
    trainer.save()
    with torch.no_grad():
        next(trainer.step.model.parameters())[0, 0] = float("inf")
    trainer.step_number = 6
    with pytest.raises(MeasurementError, match="step-00000005 is intact"):
        trainer.save()
    assert newest_checkpoint(tmp_path).name == "step-00000005"


def test_other_data_is_refused_on_resume_and_moved_data_is_not(tmp_path):
    source = np.random.default_rng(0)
    path, moved = tmp_path / "x.npy", tmp_path / "moved.npy"
    np.save(path, source.normal(size=(6, 200)).astype(np.float32))
    spec = make_spec(tmp_path / "c", dataset_path=str(path), seq_stride=20)
    train(spec, silent(), Stop())
    saved = newest_checkpoint(tmp_path / "c")
    path.rename(moved)
    there = replace(spec, settings=replace(spec.settings, dataset_path=str(moved), epochs=2))
    assert train(there, silent(), Stop(), saved).step == 40
    np.save(moved, source.normal(size=(6, 200)).astype(np.float32))
    with pytest.raises(UserError, match="holds other series"):
        train(there, silent(), Stop(), saved)


def test_validation_and_saving_are_no_data_wait(tmp_path, monkeypatch):
    """The loop validates after every step, so every step is counted from its own entry."""
    monkeypatch.setattr("steplab.train.loop.validate", lambda *a: (time.sleep(0.05), 1.0)[1])
    spec = make_spec(tmp_path, validate_every=1, checkpoint_every=0, log_every=10)
    reports = []
    log = silent()
    log.report = reports.append
    train(spec, log, Stop())
    assert len(reports) == 2
    assert all(report.meter["train/data_wait_ms"] == 0 for report in reports)


def test_parts_belong_to_the_loss_under_accumulation(tmp_path):
    spec = make_spec(tmp_path, accumulate=4, checkpoint_every=0, log_every=5)
    reports = []
    log = silent()
    log.report = reports.append
    train(spec, log, Stop())
    for report in reports:
        whole = report.parts["pred"] + 0.02 * report.parts["aux"]
        assert report.loss == pytest.approx(whole, rel=1e-5)


def test_a_full_disk_in_the_middle_is_a_warning(tmp_path, monkeypatch):
    original, calls = Trainer.save, []

    def save(self):
        calls.append(self.step_number)
        if len(calls) == 1:
            raise UserError("Cannot write: the disk is full.")
        return original(self)

    monkeypatch.setattr(Trainer, "save", save)
    said = []
    outcome = train(make_spec(tmp_path), TrainingLog(said.append, None, perf=False), Stop())
    assert calls == [10, 20] and outcome.saved.name == "step-00000020"
    assert any("no checkpoint of step 10" in line for line in said)


def test_a_short_run_reports_its_loss_and_leaves_no_trace(tmp_path):
    said = []
    spec = make_spec(tmp_path, steps_per_epoch=3, log_every=50, profile=True, checkpoint_every=0)
    train(spec, TrainingLog(said.append, None, perf=False), Stop())
    assert any(line.startswith("step=3 loss=") for line in said)
    assert any("no trace" in line for line in said)
    assert not (tmp_path / "profiler" / "chrome_trace.json").exists()


def test_validation_looks_at_many_series(tmp_path):
    from steplab.data.synthetic import SyntheticSeries
    from steplab.data.windows import Windows
    from steplab.train.loop import validate

    seen = set()

    class Watched(SyntheticSeries):
        def read(self, index, start, stop):
            seen.add(index)
            return super().read(index, start, stop)

    spec = make_spec(tmp_path, validation_batches=4)
    trainer = Trainer(spec, silent())
    windows = Windows(Watched(20, 2000, 1), 41, 40)
    first = validate(trainer.step, windows, spec.settings)
    assert len(seen) > 8
    assert validate(trainer.step, windows, spec.settings) == first


def test_validation_routes_by_the_token_alone(tmp_path):
    """HYDRA's routers compare a token with later ones in training, which no generation can."""
    from steplab.data.synthetic import SyntheticSeries
    from steplab.data.windows import Windows
    from steplab.train.loop import validate

    spec = make_spec(tmp_path, validation_batches=2)
    trainer = Trainer(spec, silent())
    within, seen = [], []

    @contextlib.contextmanager
    def causal_routing():
        within.append(1)
        yield
        within.pop()

    trainer.step.model.causal_routing = causal_routing
    trainer.step.model.register_forward_pre_hook(lambda *_: seen.append(len(within)))
    validate(trainer.step, Windows(SyntheticSeries(20, 2000, 1), 41, 40), spec.settings)
    assert seen == [1, 1] and not within


def test_a_finished_run_can_go_on(tmp_path):
    spec = make_spec(tmp_path)
    train(spec, silent(), Stop())
    longer = replace(spec, settings=replace(spec.settings, epochs=2))
    assert train(longer, silent(tmp_path), Stop(), newest_checkpoint(tmp_path)).step == 40
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert first["train/resumed_at"] == 20
