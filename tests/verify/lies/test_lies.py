"""Every lie is red, with the right tensor named; every honest model is green."""

import pytest

from steplab.techniques.recipes import parse_recipe
from tests.verify.lies import wrong_techniques
from tests.verify.lies.cases import HONEST, LIES, RECIPES, Case, Lie
from tests.verify.lies.honest_technique import other_order
from tests.verify.planted import PLANTED, plant


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_a_lie_is_red_and_the_right_tensor_named(monkeypatch, lie: Lie):
    if lie.name:
        plant(monkeypatch, getattr(wrong_techniques, lie.name))
    found = lie.case.red(lie.recipe)
    assert lie.tensor in found.get(lie.group, ""), found


@pytest.mark.parametrize(("name", "recipe"), RECIPES)
def test_an_honest_model_is_green(name, recipe):
    assert Case(name).red(parse_recipe(recipe)) == {}


@pytest.mark.parametrize("name", HONEST)
def test_so_it_is_where_sums_are_taken_in_another_order(monkeypatch, name):
    plant(monkeypatch, other_order)
    assert Case(name).red(PLANTED) == {}
