"""What computes the same passes; what does not never does."""

from dataclasses import replace

import pytest
import torch

from steplab.core import RunSpec
from steplab.techniques.recipes import parse_recipe
from steplab.verify.judge import GROUPS
from steplab.verify.references import find_dropout, step_without_dropout
from steplab.workloads.workload import find_workload
from tests.own_models import named
from tests.verify.planted import (
    BAD,
    PLANTED,
    dropped_gradient,
    own_file,
    plant,
    planted_spec,
    unscaled_init,
    verdicts,
    wrong_scaling,
)

HONEST = [
    "plain",
    "precision=bf16",
    "precision=fp16",
    "optimizer=fused",
    "optimizer=foreach",
    "impl.attention=math",
    "impl.attention=tiled",
    "precision=bf16,optimizer=fused",
]


def red(found) -> dict[str, str]:
    return {name: detail for name, (passed, detail) in found.items() if not passed}


@pytest.mark.parametrize("recipe", HONEST)
@pytest.mark.parametrize("seed", [1, 2])
def test_an_honest_technique_passes(tiny_spec, recipe, seed):
    assert red(verdicts(tiny_spec(recipe, seed=seed))) == {}


@pytest.mark.parametrize("change", BAD, ids=lambda change: change.__name__)
def test_a_planted_technique_never_passes(tiny_spec, monkeypatch, change):
    plant(monkeypatch, change)
    assert red(verdicts(planted_spec(tiny_spec)))


def test_the_right_group_is_red(tiny_spec, monkeypatch):
    from tests.verify.planted import every_other_update

    expected = {
        dropped_gradient: {"gradients", "loss", "update"},
        every_other_update: {"update", "loss"},
        unscaled_init: {"weights", "outputs", "loss", "gradients", "update"},
    }
    for change, groups in expected.items():
        plant(monkeypatch, change)
        assert set(red(verdicts(planted_spec(tiny_spec)))) & {*GROUPS} == groups, change.__name__


@pytest.fixture
def small_tsmoe() -> RunSpec:
    entry = find_workload("tsmoe")
    small = {"hidden_size": 32, "n_head": 2, "n_decoder_layers": 2, "d_ff": 32, "d_expert": 32}
    config = entry.resolve("tiny", {**small, "seq_max_len": 256})
    return RunSpec("tsmoe", config, "tiny", batch=4)


@pytest.mark.parametrize("recipe", ["precision=bf16", "impl.experts=loop"])
def test_experts_pass_although_tokens_may_change_theirs(small_tsmoe, recipe):
    assert red(verdicts(replace(small_tsmoe, recipe=parse_recipe(recipe)))) == {}


@pytest.mark.parametrize(
    ("change", "group", "worst"),
    [
        (unscaled_init, "weights", ".experts.w_"),
        (dropped_gradient, "gradients", ""),
        (wrong_scaling, "outputs", ""),
    ],
    ids=["unscaled_init", "dropped_gradient", "wrong_scaling"],
)
def test_what_is_planted_on_a_mixture_never_passes(small_tsmoe, monkeypatch, change, group, worst):
    plant(monkeypatch, change)
    found = red(verdicts(replace(small_tsmoe, recipe=PLANTED)))
    assert worst in found[group]


def test_experts_that_drop_tokens_do_not_pass(small_tsmoe):
    found = verdicts(replace(small_tsmoe, recipe=parse_recipe("impl.experts=capacity")))
    assert {"outputs", "gradients"} <= set(red(found))


def test_other_batches_are_unverified_and_so_red(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "import os, torch, steplab\n"
        "from torch import nn\n"
        "def factory(width: int = 8):\n"
        "    def batches(size):\n"
        "        while True:\n"
        "            g = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), 'big'))\n"
        "            yield torch.randn(size, width, generator=g)\n"
        "    model = nn.Linear(width, 1)\n"
        "    return steplab.UserModel(model, batches, lambda m, x: m(x).square().mean())\n"
    )
    found = verdicts(RunSpec(named(f"{path}:factory"), {"width": 8}))
    assert list(red(found)) == ["data"]
    assert "seed what batches() draws" in red(found)["data"]


def test_dropout_is_off_while_numerics_are_compared(tmp_path):
    spec = own_file(
        tmp_path, "nn.Sequential(nn.Linear(width, 8), nn.Dropout(0.3), nn.Linear(8, 1))"
    )
    assert find_dropout(step_without_dropout(spec).model) == []
    assert red(verdicts(spec)) == {}


def test_the_default_dtype_is_put_back(tiny_spec):
    verdicts(tiny_spec())
    assert torch.get_default_dtype() == torch.float32
