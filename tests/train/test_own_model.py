"""Checkpoints of a model of one's own hold its name and hash; its user names the file."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from steplab.cli.main import main
from steplab.core import TrainSettings, TrainSpec
from steplab.forecasting.forecaster import Forecaster
from steplab.train.checkpoint_files import CHECKPOINT_FILE, newest_checkpoint
from steplab.train.loop import Stop, Trainer
from steplab.workloads.user_model import load_user_model
from tests.train.tiny_runs import SHAPE, make_spec, silent

MODEL = f"""
import steplab
from steplab.workloads.workload import find_workload

SHAPE = {SHAPE}

def make(seq_max_len: int = 40):
    entry = find_workload("tsmoe")
    inner = entry.open(entry.resolve("tiny", {{**SHAPE, "seq_max_len": seq_max_len}}))
    def batches(size):
        raise NotImplementedError
    return steplab.UserModel(inner.model(), batches, inner.loss, seq_max_len)
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Work in a folder with my_model.py, a checkpoint of it, and some series."""
    monkeypatch.chdir(tmp_path)
    Path("my_model.py").write_text(MODEL)
    np.save("series.npy", np.sin(np.arange(200.0)))
    entry = load_user_model("my_model.py:make")
    settings = TrainSettings(
        steps_per_epoch=2, batch_size=2, validate_every=0, validation_batches=0
    )
    spec = TrainSpec(entry.name, entry.resolve("", {}), settings=settings, source=entry.source)
    Trainer(spec, silent()).run(Stop())
    return entry


def steplab(capsys, words: str) -> tuple[int, str, str]:
    code = main(words.split())
    said = capsys.readouterr()
    return code, said.out, said.err


def recorded(folder: str = "checkpoints") -> dict:
    file = newest_checkpoint(Path(folder)) / CHECKPOINT_FILE
    return json.loads(file.read_text())["content"]["progress"]["spec"]


NEW = "--from-checkpoint checkpoints --checkpoint-dir new --batch-size 2 --steps-per-epoch 1"


def test_a_checkpoint_holds_name_and_hash_but_no_code(mine):
    spec = recorded()
    assert (spec["workload"], spec["source"]) == ("my_model.py:make", mine.source)
    assert not list(Path("checkpoints").rglob("*.py"))


@pytest.mark.parametrize("words", ["--resume --epochs 2", NEW])
@pytest.mark.parametrize("name", ["--model {}", "{}"])
def test_training_goes_on_where_the_file_is_named(mine, capsys, words, name):
    """By the flag or as the first word, wherever the file lies now."""
    Path("elsewhere").mkdir()
    shutil.move("my_model.py", "elsewhere/renamed.py")
    code, said, error = steplab(capsys, f"train {name.format('elsewhere/renamed.py:make')} {words}")
    assert code == 0, error
    assert "code has changed" not in said
    assert "--model elsewhere/renamed.py:make" in said.splitlines()[-1]  # how to go on
    spec = recorded("new" if "new" in words else "checkpoints")
    assert (spec["workload"], spec["source"]) == ("elsewhere/renamed.py:make", mine.source)


@pytest.mark.parametrize("command", ["train --resume --epochs 2", f"train {NEW}", "forecast"])
def test_other_code_is_said(mine, capsys, command):
    if command == "forecast":
        command += " series.npy --horizon 2"
    Path("my_model.py").write_text(MODEL + "# changed\n")
    code, said, error = steplab(capsys, f"{command} --model my_model.py:make")
    assert code == 0, error
    now = load_user_model("my_model.py:make").source
    (note,) = [line for line in (said + error).splitlines() if line.startswith("note: the code")]
    assert f"my_model.py:make (hash {mine.source})" in note and f"(hash {now})" in note


@pytest.mark.parametrize("command", ["forecast series.npy", "evaluate --windows 1"])
def test_forecasts_of_a_model_of_ones_own(mine, capsys, command):
    code, _, error = steplab(capsys, f"{command} --horizon 2 --model my_model.py:make")
    assert code == 0 and "note: the code" not in error, error
    code, _, error = steplab(capsys, f"{command} --horizon 2")
    assert code == 2 and "Name the file: --model my_model.py:make" in error


def test_forecasts_in_python(mine):
    found = Forecaster.load("checkpoints", model="my_model.py:make").predict(np.arange(30.0), 3)
    assert found.mean_BH.shape == (1, 3)
    Path("my_model.py").write_text(MODEL + "# changed\n")
    with pytest.warns(UserWarning, match="the code has changed"):
        Forecaster.load("checkpoints", model="my_model.py:make")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("generate --model my_model.py:make", "my_model.py:make, which writes no text"),
        ("train --resume --model nowhere.py:make", "no file nowhere.py"),
        ("train --resume --model my_model.py", "Name a function of it, as in my_model.py:make."),
        ("train --resume --model gpt", "is neither path/to/file.py:factory"),
        ("train --resume --checkpoint-dir built-in --model my_model.py:make", "built-in tsmoe"),
        ("train my_model.py:make --resume --checkpoint-dir built-in", "built-in tsmoe"),
        ("forecast series.npy --horizon 2 --checkpoint built-in --model my_model.py:make",
         "Leave my_model.py:make out"),
        ("train --model my_model.py:make", "--model is for --resume and --from-checkpoint"),
        ("train gpt --resume", "is a model of my_model.py:make, not of gpt"),
    ],
)  # fmt: skip
def test_bad_requests_are_one_sentence(mine, capsys, words, complaint):
    Trainer(make_spec("built-in", steps_per_epoch=1), silent()).run(Stop())
    code, _, error = steplab(capsys, words)
    assert code == 2 and complaint in error and error.count("\n") == 1
