"""What the techniques on the shelf offer, for steps of several kinds."""

from dataclasses import replace

import pytest

from steplab.record import Accelerator, Ran
from steplab.spec import Recipe
from steplab.techniques.parse import parse_recipe
from steplab.techniques.situation import Situation
from steplab.tune.offers import conflict, impls_of, is_slow, proposals
from tests.compare.sides import ENVIRONMENT, run_of
from tests.tune.ladders import Pretended, use_shelf

H200 = replace(ENVIRONMENT, accelerators=(Accelerator("NVIDIA H200", 2**37),), cuda="12.8")
RAN = Ran({"attention": ("flash",), "experts": ("grouped",)}, optimizer="forloop")


def offered(recipe="plain", on_gpu=False, objective="time", ran=RAN, **more):
    device = {"environment": H200, "device": "cuda"} if on_gpu else {}
    run = replace(run_of(recipe=parse_recipe(recipe).techniques, **device), ran=ran)
    now = Situation(run, objective, impls_of(run), **more)
    return {proposal.key: proposal for proposal in proposals(now, {})}


def test_a_plain_step_is_offered_every_kind_of_change():
    found = offered()
    assert {"precision=bf16", "optimizer=fused", "compile=blocks", "compile=whole"} <= set(found)
    assert {"impl.attention=math", "impl.experts=loop"} <= set(found)
    assert not [key for key in found if "tf32" in key or "reduce-overhead" in key]


def test_what_changes_the_result_and_what_is_there_to_be_read_is_not_offered():
    found = offered()
    assert "impl.experts=capacity" not in found
    assert "impl.attention=reference" not in found and "impl.attention=flash" not in found


def test_a_gpu_is_offered_more():
    assert {"precision=tf32", "precision=bf16", "cuda_graph=step"} <= set(offered(on_gpu=True))


def test_a_change_keeps_the_other_settings():
    found = offered("compile=blocks,precision=bf16")
    assert found["compile.optimizer=true"].recipe.label == (
        "compile=blocks,compile.optimizer=true,precision=bf16"
    )
    assert found["compile=whole"].recipe.techniques["compile"] == {"scope": "whole"}
    assert not [key for key in found if key.startswith("precision")]
    found = offered("impl.experts=loop")
    assert found["impl.attention=math"].recipe.label == "impl.experts=loop,impl.attention=math"


def test_what_the_baseline_ran_is_not_offered_again():
    ran = Ran({"experts": ("loop",)})
    first = {"experts": "grouped"}
    assert "impl.experts=grouped" not in offered("impl.experts=loop", ran=ran, first_impls=first)
    assert "impl.experts=grouped" in offered("impl.experts=loop", ran=ran)


def test_the_update_is_never_made_slower():
    assert "optimizer=foreach" not in offered(ran=replace(RAN, optimizer="fused"))
    assert "optimizer=foreach" in offered()


def test_memory_has_its_own_offers():
    found = offered(objective="memory")
    assert "checkpointing=blocks" in found and "optimizer=fused" not in found
    assert "checkpointing=blocks" not in offered()


def test_a_file_dropped_on_the_shelf_is_tried(monkeypatch):
    use_shelf(monkeypatch, {"dropped_in": Pretended({})})
    assert list(offered("plain")) == ["dropped_in=true"]


@pytest.mark.parametrize(("recipe", "slow"), [("plain", False), ("compile=whole", True)])
def test_compiling_takes_long(recipe, slow):
    assert is_slow(parse_recipe(recipe)) is slow


def test_a_recipe_that_cannot_be_has_a_reason():
    both = {
        "compile": {"scope": "whole", "mode": "reduce-overhead"},
        "cuda_graph": {"scope": "step"},
    }
    assert "graphs of its own" in conflict(Recipe(both))
    assert conflict(Recipe()) == ""
