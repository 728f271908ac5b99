import csv
import json
import subprocess
import sys

import numpy as np
import pytest

from steplab.cli.main import main
from steplab.forecasting.evaluation import data

TINY = """--hidden-size 16 --n-decoder-layers 1 --n-head 2 --num-experts 2 --d-ff 16 --d-expert 8
--seq-max-len 40 --horizons 1,8 --batch-size 2 --steps-per-epoch 2 --log-every 2
--validation-batches 1""".split()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate") / "c"
    assert main(["train", *TINY, "--checkpoint-dir", str(folder)]) == 0
    return str(folder)


@pytest.fixture(autouse=True)
def few_series(monkeypatch):
    monkeypatch.setattr(data, "SERIES_PER_FAMILY", 1)
    monkeypatch.setattr(data, "LENGTH", 128)


def evaluate(*words):
    return main(["evaluate", *map(str, words)])


def test_generated_series_table_files_and_page(checkpoint, tmp_path, capsys):
    out = [tmp_path / f"x.{kind}" for kind in ("json", "md", "csv")]
    picture = tmp_path / "x.html"
    words = ["--checkpoint", checkpoint, "--horizon", 12, "--out", *out, "--picture", picture]
    assert evaluate(*words) == 0
    said = capsys.readouterr().out
    assert "trend_seasonal" in said and "chirp *" in said and "seasonal naive" in said
    assert "ND = sum |error|" in said and "geometric mean" in said
    found = json.loads((tmp_path / "x.json").read_text())
    # 12 points are 8 + 1 + 1 + 1 + 1, of which 11 are fed back into windows of 40.
    assert len(found["groups"]) == 10 and found["horizon"] == 12 and found["context"] == 29
    assert found["summaries"][-1]["windows"] == 20 and found["levels"] == []
    rows = list(csv.reader((tmp_path / "x.csv").read_text().splitlines()))
    assert len(rows) == 1 + 10 + 3 and rows[0][2:4] == ["MASE", "naive"]
    assert (tmp_path / "x.ratios.md").read_text().count("\n|") == 2 + 10 + 6
    assert "MASE against seasonal naive" in picture.read_text()


def test_it_says_the_same_twice(checkpoint, tmp_path):
    for name in ("a", "b"):
        words = ["--checkpoint", checkpoint, "--horizon", 8, "--out", tmp_path / f"{name}.json"]
        assert evaluate(*words) == 0
    one, other = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("a", "b"))
    assert one.pop("seconds") > 0 and other.pop("seconds") > 0
    assert one == other


def test_own_data_with_a_period_and_missing_points(checkpoint, tmp_path, capsys):
    points = np.tile([1.0, 5.0, 2.0], 30) + np.random.default_rng(0).normal(size=90)
    points[[3, 40, 88]] = np.nan
    np.save(tmp_path / "x.npy", points)
    words = ["--data", tmp_path / "x.npy", "--period", 3, "--windows", 3, "--horizon", 10]
    assert evaluate("--checkpoint", checkpoint, *words) == 0
    said = capsys.readouterr().out
    assert "x.npy" in said and "used the period 3, as given" in said and "*" not in said


def test_a_context_that_the_model_cannot_use_is_noted(checkpoint, capsys):
    assert evaluate("--checkpoint", checkpoint, "--context", 500, "--horizon", 8) == 0
    said = capsys.readouterr()
    assert "uses 40 points of the past, not 500" in said.err and "context 40" in said.out
    assert evaluate("--checkpoint", checkpoint, "--context", 20, "--horizon", 8) == 0
    assert "context 20" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--horizon", "0"], "--horizon must be at least 1"),
        (["--windows", "0"], "--windows must be at least 1"),
        (["--context", "0"], "--context must be at least 1"),
        (["--period", "0"], "--period must be at least 1"),
        (["--batch", "0"], "--batch must be at least 1"),
        (["--out", "x.txt"], "Use a suffix of .json, .md, .csv"),
        (["--picture", "x.gif"], "Use .html or .png"),
        (["--data", "nowhere.npy"], "nowhere.npy does not exist"),
        (["--recipe", "speed=9"], "speed"),
        (["--checkpoint", "nowhere"], "There is no checkpoint nowhere"),
        (["--device", "tpu"], "tpu"),
    ],
)
def test_bad_arguments_are_refused_in_one_sentence(words, message, capsys):
    assert evaluate(*words) == 2
    assert message in capsys.readouterr().err


def test_without_a_checkpoint_it_says_how_to_make_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert evaluate() == 2
    assert "steplab train" in capsys.readouterr().err


def test_series_of_the_training_are_not_held_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("steplab.forecasting.evaluation.evaluate.EVALUATION_SEED", 42)
    assert main(["train", *TINY, "--checkpoint-dir", str(tmp_path)]) == 0
    assert evaluate("--checkpoint", tmp_path, "--horizon", 8) == 2
    assert "not held out" in capsys.readouterr().err


def test_help_imports_neither_torch_nor_pandas():
    code = (
        "import sys; from steplab.cli.main import main\n"
        "for words in (['evaluate', '--help'], ['bench', 'infer', '--help']):\n"
        "    try: main(words)\n"
        "    except SystemExit: pass\n"
        "assert not {'torch', 'pandas', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
