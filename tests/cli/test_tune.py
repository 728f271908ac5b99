"""`steplab tune` from the outside."""

import json

import pytest

pytest.importorskip("rich")

from steplab.cli.main import main
from steplab.techniques.recipes import read_recipe_file

SMALL = "--width 32 --ff-width 64 --layers 2 --heads 2 --context 16 --vocab-size 64".split()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--objective", "speed"], "objective"),
        (["--budget", "0"], "--budget must be more than 0"),
        (["--also-batch", "-1"], "--also-batch must be more than 0"),
        (["--device", "gpu"], "no device"),
        (["--recipe", "compil=whole"], "Did you mean 'compile'?"),
        (["--sizes", "tiny"], "--size"),
        (["--batch", "0"], "batch must be at least 1"),
        (["--batch", "many"], "a number or auto, not 'many'"),
        (["--against", "optimiser=fused"], "Did you mean 'optimizer'?"),
    ],
)
def test_a_slip_of_the_pen_is_told_before_anything_starts(words, said, capsys, monkeypatch):
    def no_worker(*args):
        raise AssertionError("a worker was started")

    monkeypatch.setattr("steplab.workers.client.Worker.__init__", no_worker)
    assert main(["tune", "gpt", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_short_search_ends_with_a_report_and_can_go_on(tmp_path, capsys, monkeypatch):
    """Little time: the baseline, perhaps a rung or two, and what is left is told."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    store = tmp_path / "store"
    words = ["tune", "gpt", *SMALL, "--batch", "2", "--budget", "0.3", "--store", str(store)]
    assert main([*words, "--device", "cpu"]) == 0
    printed = capsys.readouterr()
    assert "performance impact" in printed.out and "stopped:" in printed.out
    (folder,) = (store / "ladders").iterdir()
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Tuning gpt tiny, batch 2" in page and "numerics against fp64" in page
    ladder = json.loads((folder / "ladder.json").read_text())
    assert ladder["baseline_checks"] and all(c["passed"] for c in ladder["baseline_checks"])
    assert ladder["left"] or ladder["finished"]
    read_recipe_file(folder / "recipe.toml")
    runs = list((store / "runs").glob("[0-9]*/run.json"))
    assert runs, "the baseline is a Run like any other"
