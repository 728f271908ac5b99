"""Every lie is red, with the right tensor named; every honest model is green."""

import pytest

from steplab.techniques.recipes import parse_recipe
from steplab.verify.curves import check_curves
from tests.verify.lies import wrong_techniques
from tests.verify.lies.cases import BF16_WEIGHTS, HONEST, LIES, RECIPES, Case, Lie
from tests.verify.lies.honest_technique import other_order
from tests.verify.planted import PLANTED, plant


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_a_lie_is_red_and_the_right_tensor_named(monkeypatch, lie: Lie):
    if lie.name:
        plant(monkeypatch, getattr(wrong_techniques, lie.name))
    found = lie.case.red(lie.recipe)
    assert lie.tensor in found.get(lie.group, ""), found


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("lie", [lie for lie in LIES if not lie.name], ids=str)
def test_a_wrong_model_is_red_with_16_bit_weights_too(lie: Lie):
    assert lie.tensor in lie.case.red(parse_recipe(BF16_WEIGHTS)).get(lie.group, "")


@pytest.mark.parametrize(("name", "recipe"), RECIPES)
def test_an_honest_model_is_green(name, recipe):
    assert Case(name).red(parse_recipe(recipe)) == {}


@pytest.mark.parametrize("recipe", ["precision=bf16", "optimizer=foreach"])
def test_so_is_one_that_predicts_ids(recipe):
    assert Case("token_ids", mode="infer").red(parse_recipe(recipe)) == {}


@pytest.mark.parametrize("name", HONEST)
def test_so_it_is_where_sums_are_taken_in_another_order(monkeypatch, name):
    plant(monkeypatch, other_order)
    assert Case(name).red(PLANTED) == {}


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("summed_loss", "optimizer=foreach"),
        ("contrastive", "precision=bf16"),
        ("batchnorm_blocks", "precision=bf16"),
        ("hits", "precision=bf16"),
        ("post_norm", BF16_WEIGHTS),
    ],
)
def test_curves_of_honest_steps_stay_together(tmp_path, name, recipe):
    checks = check_curves(Case(name).spec(parse_recipe(recipe)), tmp_path)
    assert [check.detail for check in checks if not check.passed] == []


def test_updates_that_stop_when_nobody_looks_are_red(monkeypatch, tmp_path):
    plant(monkeypatch, wrong_techniques.stops_after_eight)
    case = Case("two_losses")
    assert case.red(PLANTED) == {}
    found = {check.name: check for check in check_curves(case.spec(PLANTED), tmp_path)}
    moves = found["moves at batch 2, over 64 steps"]
    assert not moves.passed and "worst steps 16 to 31: error 1.0e+00" in moves.detail


@pytest.mark.parametrize(
    ("name", "model", "group", "tensor"),
    [
        ("statistics_stop_after_eight", "batchnorm_blocks", "buffers", "blocks."),
        ("metrics_stop_after_eight", "counted", "outputs", "accuracy"),
    ],
)
def test_so_are_buffers_and_metrics_that_stop(monkeypatch, tmp_path, name, model, group, tensor):
    plant(monkeypatch, getattr(wrong_techniques, name))
    case = Case(model)
    assert case.red(PLANTED) == {}
    wrong = {c.name: c.detail for c in check_curves(case.spec(PLANTED), tmp_path) if not c.passed}
    assert list(wrong) == [f"{group} at batch 2, over 64 steps"]
    assert tensor in wrong[f"{group} at batch 2, over 64 steps"]


@pytest.mark.parametrize("name", ["smaller_decay_in_bf16", "other_eps_in_bf16"])
def test_an_optimizer_is_asked_by_itself(monkeypatch, tmp_path, name):
    """Where the error of 16-bit gradients hides what its settings change."""
    plant(monkeypatch, getattr(wrong_techniques, name))
    checks = check_curves(Case("tied_weights").spec(PLANTED), tmp_path)
    assert [c.name for c in checks if not c.passed] == ["update rule at batch 2, over 64 steps"]


def test_so_is_a_decay_that_stops(monkeypatch, tmp_path):
    plant(monkeypatch, wrong_techniques.decay_stops_after_eight)
    case = Case("tied_weights")
    assert case.red(PLANTED) == {}
    checks = check_curves(case.spec(PLANTED), tmp_path)
    assert {check.name.split(" at ")[0] for check in checks} == {"losses", "moves", "update rule"}
    assert {check.name[:6] for check in checks if not check.passed} == {"losses", "moves "}
