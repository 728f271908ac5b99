"""The modes of torch.compile side by side: what they cost at the start and when that pays."""

import os
from dataclasses import replace

import pytest

pytest.importorskip("rich")

from steplab.bench.compile_modes import (
    CACHES,
    EAGER,
    ModeRuns,
    empty_caches,
    mode_specs,
    mode_table,
)
from steplab.cli.main import main
from steplab.core import Compilation
from steplab.core.errors import UserError
from steplab.techniques.recipes import parse_recipe
from tests.compare.test_step_tables import cells, make_run

TINY = "--size tiny --layers 2 --width 16 --heads 2 --ff-width 16 --context 8 --vocab-size 32"


def compiled(ms, seconds):
    return replace(make_run(ms=ms), compilation=Compilation(4, 0, first_seconds=seconds))


def test_a_mode_pays_when_what_it_saves_is_what_its_start_cost():
    table = mode_table(
        [
            ModeRuns(EAGER, make_run(ms=10.0)),
            ModeRuns("default", compiled(6.0, 8.0), compiled(6.0, 2.0)),
            ModeRuns("max-autotune", compiled(11.0, 90.0), compiled(11.0, 3.0)),
            ModeRuns("reduce-overhead", make_run(status="unsupported")),
        ]
    )
    rows = {row["mode"]: row for row in cells(table)}
    assert rows["default"]["cold [s]"] == 8 and rows["default"]["warm [s]"] == 2
    assert rows["default"]["pays after [steps]"] == 2000
    assert rows["default"]["speed-up"] == pytest.approx(10 / 6)
    assert rows["max-autotune"]["pays after [steps]"] == "never"
    assert rows["eager"]["pays after [steps]"] == "" and rows["eager"]["cold [s]"] is None
    assert rows["reduce-overhead"]["status"].startswith("unsupported")


def test_every_mode_is_added_to_the_recipe(tiny_spec):
    specs = mode_specs(tiny_spec("precision=bf16"), "whole", ["default"])
    labels = {mode: spec.recipe.label for mode, spec in specs.items()}
    assert labels["eager"] == "precision=bf16"
    assert labels["default"] == "compile=whole,compile.mode=default,precision=bf16"
    with pytest.raises(UserError, match="compiles already"):
        mode_specs(tiny_spec(parse_recipe("compile=whole")), "whole", ["default"])


def test_caches_are_empty_inside_and_as_they_were_afterwards(monkeypatch):
    monkeypatch.setenv(CACHES[0], "mine")
    monkeypatch.delenv(CACHES[1], raising=False)
    with empty_caches():
        inside = [os.environ[name] for name in CACHES]
        assert "mine" not in inside and len(set(inside)) == 2
    assert os.environ[CACHES[0]] == "mine" and CACHES[1] not in os.environ


def test_a_mode_that_this_machine_has_not_is_a_row(tmp_path, capsys):
    words = ["bench", "compile", "gpt", *TINY.split(), "--steps", "2", "--warmup", "1"]
    words += ["--store", str(tmp_path), "--device", "cpu", "--modes", "reduce-overhead"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "eager" in out and "unsupported: compile.mode=reduce-overhead is CUDA" in out
    assert main([*words, "--recipe", "compile=whole"]) == 2


@pytest.mark.long
@pytest.mark.slow
def test_cold_and_warm_starts(tmp_path, capsys):
    words = ["bench", "compile", "gpt", *TINY.split(), "--steps", "2", "--warmup", "1"]
    words += ["--store", str(tmp_path), "--device", "cpu", "--modes", "default"]
    assert main(words) == 0
    assert "cold [s]" in capsys.readouterr().out
