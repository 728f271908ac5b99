import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rich")

from steplab.cli.main import main
from tests.forecasting.trained import train

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    train(folder / "point")
    train(folder / "quantiles", "--quantiles", "0.1,0.5,0.9")
    return folder


@pytest.fixture
def arrays(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.cumsum(np.random.default_rng(0).normal(size=(14, 25)), 1))
    return path


def forecast(*words):
    return main(["forecast", *map(str, words)])


HELP = """
import contextlib, sys
from steplab.cli.main import main
with contextlib.suppress(SystemExit):
    main(["forecast", "--help"])
sys.exit(bool({"torch", "pandas", "matplotlib"} & set(sys.modules)))
"""


def test_help_imports_nothing_slow():
    command = [sys.executable, "-c", HELP]
    done = subprocess.run(command, cwd=ROOT / "src", capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--horizon" in done.stdout


def test_arrays_to_every_file(runs, arrays, tmp_path, capsys):
    out, page = tmp_path / "f.json", tmp_path / "f.html"
    words = (arrays, "--checkpoint", runs / "point", "--horizon", 12)
    assert forecast(*words, "--out", out, "--picture", page) == 0
    shown = capsys.readouterr()
    assert "14 series, 12 points ahead" in shown.out and "and 4 more series" in shown.out
    assert "a point model: no quantiles" in shown.out and f"forecasts in {out}" in shown.out
    assert shown.err.count("note:") == 0
    document = json.loads(out.read_text())
    assert document["point_model"] and len(document["series"]) == 14
    assert document["checkpoint"].endswith("point/step-00000002")
    assert "The first 12 of 14 series." in page.read_text()


def test_frames_with_quantiles(runs, tmp_path, capsys):
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    times = pd.date_range("2024-01-01", periods=30, freq="h")
    table = pd.DataFrame({"shop": "a", "timestamp": times, "target": np.sin(np.arange(30.0))})
    table.drop(index=5).to_csv(tmp_path / "x.csv", index=False)
    words = ("--checkpoint", runs / "quantiles", "--horizon", 3, "--quantiles", "0.1,0.9")
    files = ("--out", tmp_path / "f.parquet", "--id-column", "shop")
    assert forecast(tmp_path / "x.csv", *words, *files) == 0
    found = pd.read_parquet(tmp_path / "f.parquet")
    assert list(found) == ["shop", "timestamp", "target_name", "predictions", "0.1", "0.9"]
    assert found.timestamp[0] == pd.Timestamp("2024-01-02 06:00")
    shown = capsys.readouterr()
    assert "1 point is missing" in shown.err and "read as neighbors" not in shown.err
    assert "quantiles 0.1, 0.9" in shown.out


def test_both_rules_and_a_recipe(runs, arrays, tmp_path):
    found = []
    for words in ((), ("--head", "next-larger"), ("--recipe", "precision=bf16"), ("--batch", "1")):
        out = tmp_path / "f.json"
        start = (arrays, "--checkpoint", runs / "point", "--horizon", 6, "--out", out)
        assert forecast(*start, *words) == 0
        found.append([series["mean"] for series in json.loads(out.read_text())["series"]])
    plain, larger, half, single = map(np.array, found)
    assert not np.allclose(plain, larger) and abs(plain - half).max() < 0.5
    np.testing.assert_allclose(plain, single, atol=1e-4)


def test_long_contexts_are_noted(runs, tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.arange(500.0))
    assert forecast(tmp_path / "x.npy", "--checkpoint", runs / "point", "--horizon", 8) == 0
    assert "the last 40 are used" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["nowhere.csv"], 2, "nowhere.csv does not exist"),
        (["x.npy", "--horizon", "0"], 2, "--horizon must be at least 1"),
        (["x.npy", "--horizon", "many"], 2, "invalid int value"),
        (["x.npy", "--batch", "0"], 2, "--batch must be at least 1"),
        (["x.npy", "--out", "f.xlsx"], 2, "Use .csv, .parquet, .json"),
        (["x.npy", "--picture", "f.pdf"], 2, "Use .html or .png"),
        (["x.npy", "--quantiles", "0.5"], 2, "This is a point model"),
        (["x.npy", "--quantiles", "half"], 2, "'half' is not like 0.1,0.5,0.9"),
        (["x.npy", "--head", "larger"], 2, "invalid choice"),
        (["x.npy", "--recipe", "compile=blocks"], 2, "cannot have compile"),
        (["x.npy", "--recipe", "precison=bf16"], 2, "Did you mean 'precision'"),
        (["x.npy", "--freq", "D"], 2, "has no columns and no times"),
        (["x.npy", "--horizn", "3"], 2, "Did you mean '--horizon'"),
        (["x.npy", "--out", "/proc/x/f.csv"], 2, "Cannot write to /proc/x"),
        (["x.npy", "--checkpoint", "nowhere"], 2, "There is no checkpoint nowhere"),
        (["nan.npy"], 2, "Series 1 has no known point"),
    ],
)
def test_bad_input_is_one_sentence(words, code, said, runs, arrays, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("nan.npy", np.array([[1.0, 2.0], [np.nan, np.nan]]))
    start = ["--horizon", "4", "--checkpoint", str(runs / "point")]
    assert forecast(*start, *words) == code
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1


def test_without_any_checkpoint_the_error_names_the_command(arrays, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert forecast(arrays, "--horizon", "4") == 2
    error = capsys.readouterr().err
    assert error == (
        "steplab: There is no checkpoint in checkpoints. Make one with `steplab train`, "
        "or name one.\n"
    )
