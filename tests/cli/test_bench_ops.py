import json

import pytest

from steplab.cli import op_bench
from steplab.cli.main import main
from steplab.store import Store
from tests.bench.op_runs import InThisProcess

SMALL = "--context 16 32 --heads 1 --head-width 8 --impl flash cudnn --warmup 1 --repeats 6"


@pytest.fixture
def no_worker(monkeypatch):
    monkeypatch.setattr(op_bench, "TrialRunner", InThisProcess)


def test_attention_end_to_end_and_continued(tmp_path, capsys):
    out = [str(tmp_path / name) for name in ("x.md", "x.csv", "x.json")]
    words = ["bench", "attention", *SMALL.split(), "--seconds", "0", "--device", "cpu"]
    words += ["--store", str(tmp_path / "store"), "--out", *out, "--plot", str(tmp_path / "x.svg")]
    assert main(words) == 0
    said = capsys.readouterr()
    assert "best by both" in said.out and "4 Runs in" in said.out
    assert "[4/4] cudnn" in said.err and "unsupported: cudnn" in said.out
    table = json.loads((tmp_path / "x.json").read_text())
    assert [row[-4].split(",")[0] for row in table["rows"]] == ["ok", "unsupported"] * 2
    assert (tmp_path / "x.best.md").exists() and (tmp_path / "x.svg").exists()
    # An interrupted sweep goes on: without its last cell only that one is measured.
    store = Store(tmp_path / "store")
    ids = store.ids()
    store.delete(ids[-1])
    assert main(words) == 0
    assert "3 cells are taken from the sweep" in capsys.readouterr().err
    assert store.ids()[:3] == ids[:3] and len(store.ids()) == 4


def test_experts(no_worker, tmp_path, capsys):
    words = "bench experts --tokens 16 --width 8 --inner 16 --experts 4 --impl loop grouped".split()
    words += "--routing skewed --warmup 1 --repeats 6 --seconds 0 --device cpu".split()
    assert main([*words, "--objective", "memory", "--store", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "best by memory" in said and "skewed" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("attention --impl flush", "Did you mean 'flash'"),
        ("attention --tiles 64 --impl triton_flash", "is not a tile"),
        ("attention --dtype fp8", "--dtype"),
        ("attention --objective speed", "--objective"),
        ("attention --plot x.pdf", "Cannot draw"),
        ("attention --out x.txt", "Use a suffix"),
        ("attention --device tpu", "no device 'tpu'"),
        ("attention --timeout 0", "--timeout must be more than 0"),
        ("attention --repeats 0", "--repeats must be at least 1"),
        ("attention --contxt 5", "Did you mean '--context'"),
        ("experts --routing even", "--routing"),
        ("experts --top-k 9", "cannot choose 9 of 8"),
    ],
)
def test_bad_values_are_refused(words, message, tmp_path, capsys):
    assert main(["bench", *words.split(), "--store", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_an_error_when_no_cell_can_be_measured(no_worker, tmp_path, capsys):
    words = "bench attention --context 16 --impl cudnn --device cpu".split()
    assert main([*words, "--store", str(tmp_path)]) == 3
    assert "No cell could be measured" in capsys.readouterr().err
