"""Models that others wrote: their factories train, and the runner tells how a search ended."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from steplab.core import Recipe, RunSpec
from steplab.core.comparison import Change
from steplab.core.ladder import Check, Ladder, Rung
from tests.compare.sides import ENVIRONMENT

FOLDER = Path(__file__).parents[1] / "benchmarks"
LIBRARIES = {"hugging_face": "transformers", "x_transformers_decoder": "x_transformers"}


@pytest.fixture
def runner(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.delitem(sys.modules, "foreign_models", raising=False)
    return importlib.import_module("foreign_models")


def _factories():
    files = [file.stem for file in (FOLDER / "foreign_models").glob("*.py")]
    return sorted(set(files) - set(LIBRARIES)), sorted(LIBRARIES)


@pytest.mark.parametrize("stem", [*_factories()[0], *_factories()[1]])
def test_a_factory_trains(stem, runner, monkeypatch):
    if stem in LIBRARIES:
        pytest.importorskip(LIBRARIES[stem], reason="its models are those of that library")
    monkeypatch.syspath_prepend(FOLDER / "foreign_models")
    module = importlib.import_module(stem)
    for name in (word.partition(":")[2] for word in runner.MODELS.values() if stem in word):
        made = getattr(module, name)()
        optimizer = (made.optimizer or (lambda model: torch.optim.AdamW(model.parameters())))(
            made.model
        )
        batches = iter(made.batches(2))
        for _ in range(2):
            output = made.loss(made.model, next(batches))
            getattr(output, "loss", output).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.isfinite(getattr(output, "loss", output))


def test_every_factory_is_in_the_table(runner):
    files = {word.partition(":")[0] for word in runner.MODELS.values()}
    assert files == {file.name for file in (FOLDER / "foreign_models").glob("*.py")}


def test_lines_to_adopt_are_those_of_the_factory(runner, tmp_path):
    file = tmp_path / "model.py"
    file.write_text(
        "def network():\n    return 1\n\n\ndef _loss(x):\n    return x\n\n\n"
        'def make(width=2):\n    """Words."""\n    x = network()\n\n    return x, _loss\n'
    )
    assert runner.lines_to_adopt(file, "make") == 3 + 2


def test_a_search_that_verified_nothing_has_failed(runner):
    ladder = Ladder("id", RunSpec("gpt"), ENVIRONMENT)
    tuned = runner.Tuned("LSTM", 0, 100.0, 90.0, 1.0, "", ladder, "fp64")
    assert runner.end(tuned) == "failure: nothing was verified (no rung was finished)"
    red = Rung("precision", {"dtype": "bf16"}, Recipe({"precision": {"dtype": "bf16"}}), Recipe(),
               "red gate", checks=(Check("weights", False, "too far"),))  # fmt: skip
    tuned = replace(tuned, ladder=replace(ladder, rungs=(red,)))
    assert runner.end(tuned) == "failure: nothing was verified (precision=bf16 red gate)"
    green = replace(red, outcome="no gain", checks=(Check("weights", True, "equal"),))
    tuned = replace(tuned, ladder=replace(ladder, rungs=(red, green)))
    assert runner.end(tuned).startswith(runner.NOTHING)
    noisy = replace(green, outcome="cannot tell")
    unclear = replace(tuned, ladder=replace(ladder, rungs=(green, noisy)))
    assert runner.end(unclear).startswith(runner.UNCLEAR)
    settled = replace(tuned, ladder=replace(ladder, rungs=(noisy, green)))
    assert runner.end(settled).startswith(runner.NOTHING)
    kept = replace(green, outcome="kept")
    for high, end in ((0.01, runner.NOTHING), (-0.001, runner.GAIN)):
        total = replace(ladder, rungs=(kept,), total=Change(0.0, -0.015, high, 0.99, None))
        assert runner.end(replace(tuned, ladder=total)).startswith(end)
    wide = replace(ladder, rungs=(kept,), total=Change(-0.05, -0.1, 0.02, 0.99, None))
    assert runner.end(replace(tuned, ladder=wide)).startswith(runner.UNCLEAR)
    won = replace(ladder, rungs=(green,), total=Change(-0.3, -0.4, -0.2, 0.99, None))
    assert runner.end(replace(tuned, ladder=won)) == runner.GAIN
    assert runner.end(replace(tuned, code=4, last_line="no truth")) == "failure: no truth"
