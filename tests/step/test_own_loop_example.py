"""The loop of examples/own_loop.py: by hand, and with a recipe."""

import importlib.util
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("own_loop", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.STEPS, module.EVALUATE_EVERY, module.BATCH = 6, 3, 2
    return module


@pytest.fixture(scope="module")
def by_hand(example, tmp_path_factory):
    checkpoint = tmp_path_factory.mktemp("by_hand") / "own_loop.pt"
    return example.train("cpu", checkpoint), torch.load(checkpoint, weights_only=True)


def test_the_plain_recipe_is_the_loop_by_hand(example, by_hand, tmp_path, capsys):
    losses = example.train_tuned("cpu", tmp_path / "own_loop.pt", "plain")
    assert losses == by_hand[0]
    assert capsys.readouterr().out.count("held out") == 2
    saved = torch.load(tmp_path / "own_loop.pt", weights_only=True)
    for name, expected in by_hand[1]["model"].items():
        assert torch.equal(saved["model"][name], expected)
    assert saved["adamw"]["param_groups"] == by_hand[1]["adamw"]["param_groups"]


def test_a_recipe_with_everything_that_a_cpu_has_stays_near(example, by_hand, tmp_path):
    recipe = "precision=bf16,compile=blocks,compile.backend=eager,optimizer=foreach,prefetch=2"
    losses = example.train_tuned("cpu", tmp_path / "own_loop.pt", recipe)
    # bf16 has 8 bits: a loss near 5 is off by some of its roundings, 5 / 2**8 each.
    assert losses == pytest.approx(by_hand[0], abs=3 * 5 / 2**8)
    saved = torch.load(tmp_path / "own_loop.pt", weights_only=True)
    assert list(saved["model"]) == list(by_hand[1]["model"])
