"""The command as a user runs it, in a process of its own."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("rich")

from steplab.cli.main import main
from steplab.core import RunSpec, fingerprint
from steplab.store import Store
from steplab.workloads.user_model import load_user_model

SOURCE = Path(__file__).parents[2] / "src"
SMALL = ["--layers", "1", "--width", "16", "--heads", "2", "--ff-width", "16"]
QUICK = [*SMALL, "--vocab-size", "32", "--steps", "2", "--warmup", "1"]


def bench(tmp_path, *words):
    return main(["bench", "step", *QUICK, "--store", str(tmp_path / "store"), *words])


def test_a_sweep_gives_rows_runs_and_files(tmp_path, capsys):
    out = [str(tmp_path / f"t.{kind}") for kind in ("csv", "md", "json")]
    recipes = ["plain", "impl.attention=math", "impl.attention=cudnn", "precision=tf32"]
    words = ["--context", "8", "16", "--mode", "full", "--recipe", *recipes, "--out", *out]
    assert bench(tmp_path, *words) == 0
    said = capsys.readouterr()
    assert "local exponent" in said.out and "cores" not in said.err
    rows = list(csv.DictReader((tmp_path / "t.csv").read_text().splitlines()))
    assert len(rows) == 8
    statuses = {row["recipe"]: row["status"] for row in rows}
    assert statuses["plain"].startswith("ok") and statuses["impl.attention=math"].startswith("ok")
    assert statuses["impl.attention=cudnn"].startswith("unsupported: attention 'cudnn' needs")
    assert statuses["precision=tf32"].startswith("unsupported: tf32 needs")
    assert (tmp_path / "t.md").read_text().count("\n|") == 10
    assert json.loads((tmp_path / "t.json").read_text())["title"].startswith(
        "one training step of gpt"
    )
    assert (tmp_path / "t.scaling-with-context.csv").exists()
    runs = [run for _, run in Store(tmp_path / "store").all()]
    assert len(runs) == 8 and len({run.group for run in runs}) == 1


def test_nothing_measured_because_nothing_can_run_is_exit_3(tmp_path, capsys):
    assert bench(tmp_path, "--mode", "full", "--recipe", "impl.attention=cudnn") == 3
    assert "No cell could be measured" in capsys.readouterr().err


@pytest.mark.slow
def test_warmup_study(tmp_path, capsys):
    assert bench(tmp_path, "--mode", "forward", "--warmup", "0", "2") == 0
    out = capsys.readouterr().out
    assert "warmup" in out and "cv" in out


def test_alternate(tmp_path, capsys):
    words = ["--mode", "full", "--recipe", "plain", "optimizer=fused", "--alternate", "2"]
    assert bench(tmp_path, *words) == 0
    out = capsys.readouterr().out
    assert "baseline" in out and "interval" in out
    against = Store(tmp_path / "store").load("last").against
    assert against is not None and against.recipe.label == "optimizer=fused"


def test_a_users_own_file(tmp_path, capsys):
    example = Path(__file__).parents[2] / "examples" / "own_model.py"
    words = ["bench", "step", f"{example}:recurrent", "--width", "8", "--context", "8"]
    words += ["--mode", "full", "--steps", "2", "--warmup", "1", "--store", str(tmp_path)]
    assert main(words) == 0
    assert "FLOP formulas cover 100%" in capsys.readouterr().out


def test_a_loss_that_is_no_scalar(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch, steplab\n"
        "def make():\n"
        "    def batches(size):\n"
        "        while True: yield torch.ones(size, 2)\n"
        "    return steplab.UserModel(torch.nn.Linear(2, 2), batches, lambda m, x: m(x))\n"
    )
    words = ["bench", "step", f"{path}:make", "--mode", "full", "--store", str(tmp_path / "s")]
    assert main(words) == 2
    assert "must be a scalar" in capsys.readouterr().err


def test_another_file_is_another_sweep(tmp_path, capsys):
    """After an interrupt the user changes the model: no cell of the old one may be reused."""
    text = (Path(__file__).parents[2] / "examples" / "own_model.py").read_text()
    path = tmp_path / "mine.py"
    entries = []
    for content in (text, text + "# changed\n"):
        path.write_text(content)
        entries.append(load_user_model(f"{path}:recurrent"))
    assert entries[0].source != entries[1].source
    specs = [RunSpec("mine.py:recurrent", source=entry.source) for entry in entries]
    assert fingerprint(specs[0]) != fingerprint(specs[1])


def test_a_library_name_in_the_working_directory_is_no_trap(tmp_path, monkeypatch, capsys):
    (tmp_path / "queue.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    assert bench(tmp_path, "--mode", "forward") == 0


@pytest.mark.slow
def test_an_interrupted_sweep_goes_on_where_it_was(tmp_path):
    """Ctrl-C after the first cell; the same command then measures the missing cells only."""
    store = tmp_path / "store"
    command = [sys.executable, "-m", "steplab", "bench", "step", *QUICK, "--store", str(store)]
    command += ["--mode", "full", "--context", "8", "16", "24", "32"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs the tests in the background lets them and their children ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stderr.readline().startswith("[1/4]")
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "goes on from there" in error
    assert "Traceback" not in error
    before = Store(store).ids()
    assert 1 <= len(before) < 4
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert "4 Runs" in done.stdout and "cells are taken from the sweep begun" in done.stderr
    after = Store(store).ids()
    assert len(after) == 4 and set(before) <= set(after)


def test_a_killed_sweep_loses_no_finished_cell(tmp_path):
    store = tmp_path / "store"
    command = [sys.executable, "-m", "steplab", "bench", "step", *QUICK, "--store", str(store)]
    command += ["--mode", "full", "--context", "8", "16", "24"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stderr.readline()
        process.kill()
    time.sleep(0.2)
    assert all(not isinstance(run, Exception) for _, run in Store(store).all())
    assert len(Store(store).ids()) >= 1


def test_a_cell_that_cannot_be_is_a_row(tmp_path, capsys):
    """One illegal combination of a sweep's values ended the sweep."""
    assert bench(tmp_path, "--heads", "2", "3", "--mode", "full", "--recipe", "plain") == 0
    said = capsys.readouterr()
    assert "unsupported: width 16 does not split into 3 heads" in " ".join(said.out.split())
    assert "heads 2 batch" in said.err and "heads 3 batch" in said.err
    statuses = [run.status for _, run in Store(tmp_path / "store").all()]
    assert statuses == ["ok", "unsupported"]
    assert bench(tmp_path, "--heads", "3", "5", "--mode", "full") == 2


def test_hf_is_a_flag_for_a_workload(capsys):
    assert main(["bench", "step", "gpt", "--hf", "llama"]) == 2
    assert "two workloads, gpt and --hf llama. Name one" in capsys.readouterr().err
