import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from steplab.cli.main import main
from steplab.data.formats import open_series
from steplab.data.formats.time300b import write_time300b

from ..data.stub_hub import fake_hub

SOURCE = Path(__file__).parents[2] / "src"
TINY = """--hidden-size 16 --n-decoder-layers 1 --n-head 2 --num-experts 2 --d-ff 16 --d-expert 8
--seq-max-len 40 --horizons 1,8 --batch-size 2 --steps-per-epoch 2 --log-every 2
--validation-batches 0""".split()


@pytest.fixture
def waves(tmp_path):
    """Two good series, one with a hole, one that stands still."""
    wave = np.sin(np.arange(300.0))
    series = [wave, wave[:40], np.where(np.arange(300) == 150, np.nan, wave), np.full(200, 3.0)]
    path = tmp_path / "waves.jsonl"
    path.write_text(
        "".join(json.dumps([None if x != x else x for x in s.tolist()]) + "\n" for s in series)
    )
    return path


def test_info(waves, tmp_path, capsys):
    out = tmp_path / "info.json"
    assert main(["data", "info", str(waves), "--seq-max-len", "99", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "series" in text and "with --pack" in text
    rows = {row[0]: row[1] for row in json.loads(out.read_text())["rows"]}
    assert (rows["series"], rows["points"]) == (4, 840)
    assert (rows["shortest series"], rows["median series"], rows["longest series"]) == (
        40,
        250,
        300,
    )
    assert rows["NaN or Inf"] == pytest.approx(100 / 840)
    assert rows["flat"] == pytest.approx(100 * 199 / 836)
    assert rows["step"] is None
    # 300 points hold 3 windows of 100 every 99; 40 points make one that is padded by 60.
    assert rows["windows"] == 3 + 1 + 3 + 2
    assert rows["padding"] == pytest.approx(100 * 60 / 900)
    assert rows["unused"] == pytest.approx(100 * (2 + 0 + 2 + 1) / 840)
    assert rows["unused with --pack"] <= rows["unused"]


def test_clean_writes_series_and_a_report(waves, tmp_path, capsys):
    out = tmp_path / "clean"
    assert main(["data", "clean", str(waves), "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "dropped: flat" in text and "Nothing is left of 1 series" in text
    series = open_series(out)
    assert series.lengths.tolist() == [300, 40, 150, 149]
    report = json.loads((out / "cleaning.json").read_text())
    assert report["tally"]["dropped_points"] == {"NaN or Inf": 1, "flat": 200}
    assert report["rule"] == {"window": 128, "most_zeros": 0.2, "shortest": 16}
    assert report["tally"]["kept_points"] == 639


def test_clean_by_other_rules(waves, tmp_path):
    out = tmp_path / "clean"
    words = ["--flat-share", "1", "--shortest", "150", "--flat-window", "50"]
    assert main(["data", "clean", str(waves), "--out", str(out), *words]) == 0
    assert open_series(out).lengths.tolist() == [300, 150, 200]


def test_nothing_left(tmp_path, capsys):
    (tmp_path / "x.jsonl").write_text("[1, 1, 1]\n")
    out = tmp_path / "out"
    assert main(["data", "clean", str(tmp_path / "x.jsonl"), "--out", str(out)]) == 2
    captured = capsys.readouterr()
    assert "Nothing is left" in captured.err and "dropped: flat" in captured.out
    assert not out.exists()


def test_pack_and_train_on_it(waves, tmp_path, capsys):
    np.save(tmp_path / "more.npy", np.ones((2, 60)))
    out = tmp_path / "packed"
    words = ["data", "pack", str(waves), str(tmp_path / "more.npy"), "--out", str(out)]
    assert main(words) == 0
    assert "6 series, 960 points of float32" in capsys.readouterr().out
    assert open_series(out).lengths.tolist() == [300, 40, 300, 200, 60, 60]
    folder = ["--checkpoint-dir", str(tmp_path / "c")]
    assert main(["train", *TINY, *folder, "--dataset-path", str(out)]) == 0


def test_train_on_a_frame(tmp_path, capsys):
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    times = pd.date_range("2024-01-01", periods=90, freq="h")
    frames = [
        pd.DataFrame({"item_id": name, "timestamp": times, "target": np.sin(np.arange(90.0))})
        for name in "abc"
    ]
    path = tmp_path / "x.parquet"
    pd.concat(frames).to_parquet(path)
    assert main(["data", "info", str(path)]) == 0
    assert "1 hour" in capsys.readouterr().out
    folder = ["--checkpoint-dir", str(tmp_path / "c")]
    assert main(["train", *TINY, *folder, "--dataset-path", str(path)]) == 0


def test_train_on_a_mixture(waves, tmp_path, capsys):
    write_time300b(tmp_path / "b", [np.cos(np.arange(90.0))])
    folder = ["--checkpoint-dir", str(tmp_path / "c")]
    words = ["--dataset-path", f"{waves},{tmp_path / 'b'}", "--mix", "0.75,0.25"]
    assert main(["train", *TINY, *folder, *words]) == 0
    assert main(["train", "--resume", *folder, "--mix", "0.5,0.5"]) == 2
    assert "another run" in capsys.readouterr().err
    assert main(["train", "--resume", *folder, "--epochs", "2"]) == 0


@pytest.fixture
def hub(tmp_path, monkeypatch):
    write_time300b(tmp_path / "hub" / "energy" / "bull", [np.arange(5.0)] * 3)
    module = fake_hub(tmp_path / "hub")
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return module


def test_download(hub, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main(["data", "download", "--list"]) == 0
    assert "energy" in capsys.readouterr().out
    assert main(["data", "download", "energy", "--list"]) == 0
    assert "energy/bull" in capsys.readouterr().out
    assert main(["data", "download", "energy/bull", "--out", out]) == 0
    text = capsys.readouterr().out
    assert "3 series, 15 points" in text and "steplab train --dataset-path" in text


def test_download_without_the_package(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(["data", "download", "energy"]) == 3
    assert "steplab[hub]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["info", "nowhere"], "nowhere does not exist"),
        (["info", "x.jsonl", "--seq-max-len", "0"], "not possible"),
        (["info", "x.jsonl", "--out", "x.doc"], "Cannot write x.doc"),
        (["info", "x.csv"], "has the columns 'date', 'load'"),
        (["clean", "x.jsonl"], "--out"),
        (["clean", "x.jsonl", "--out", "."], "is not an empty folder"),
        (["clean", "x.jsonl", "--out", "y", "--flat-window", "2"], "no second differences"),
        (["clean", "x.jsonl", "--out", "y", "--flat-share", "2"], "between 0 and 1"),
        (["pack", "x.jsonl", "--out", "/proc/x"], "Cannot write to /proc/x"),
        (["pack", "x.jsonl", "x.pkl", "--out", "y"], "is a pickle"),
        (["download"], "Which partition?"),
        (["cleen"], "Did you mean 'clean'"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").write_text("[1, 2, 3]\n")
    (tmp_path / "x.pkl").write_text("")
    (tmp_path / "x.csv").write_text("date,load\n2024-01-01,3\n")
    if words == ["info", "x.csv"]:
        pytest.importorskip("pandas")
        pytest.importorskip("pyarrow")
    assert main(["data", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1
    assert not (tmp_path / "y").exists()


@pytest.mark.parametrize("name", ["info", "clean", "pack", "download"])
def test_the_commands_load_without_torch_and_pandas(name):
    code = (
        f"import sys, steplab.cli.data.{name}\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'pandas', 'huggingface_hub')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=SOURCE, check=False).returncode == 0
