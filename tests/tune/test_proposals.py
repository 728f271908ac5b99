"""What the techniques suggest, for steps of several kinds."""

from dataclasses import replace

import pytest

from steplab.core import Accelerator, Budget, Category, Profile, Ran, Recipe, StepBudget
from steplab.techniques.context import StepContext
from steplab.techniques.recipes import parse_recipe
from steplab.tune.proposals import impls_of, is_slow, proposals, recipe_conflict
from tests.compare.sides import ENVIRONMENT, run_of
from tests.tune.ladders import FakeTechnique, use_techniques

H200 = replace(ENVIRONMENT, accelerators=(Accelerator("NVIDIA H200", 2**37),), cuda="12.8")
RAN = Ran({"attention": ("flash",), "experts": ("grouped",)}, optimizer="forloop")


def suggested(recipe="plain", on_gpu=False, objective="time", ran=RAN, **more):
    device = {"environment": H200, "device": "cuda"} if on_gpu else {}
    run = replace(run_of(recipe=parse_recipe(recipe).techniques, **device), ran=ran)
    context = StepContext(run, objective, impls_of(run), **more)
    return {proposal.key: proposal for proposal in proposals(context, {})}


def test_a_plain_step_is_offered_every_kind_of_change():
    found = suggested()
    assert {"precision=bf16", "optimizer=fused", "compile=blocks", "compile=whole"} <= set(found)
    assert {"impl.attention=math", "impl.experts=loop"} <= set(found)
    assert not [key for key in found if "tf32" in key or "reduce-overhead" in key]


def test_what_changes_the_result_and_what_is_there_to_be_read_is_not_offered():
    found = suggested()
    assert "impl.experts=capacity" not in found
    assert "impl.attention=reference" not in found and "impl.attention=flash" not in found


def test_a_gpu_is_offered_more():
    assert {"precision=tf32", "precision=bf16", "cuda_graph=step"} <= set(suggested(on_gpu=True))


def test_what_needs_a_gpu_is_refused_on_a_cpu_before_anybody_tries_it():
    found, on_gpu = suggested(), suggested(on_gpu=True)
    for key in ("impl.attention=cudnn", "impl.attention=triton_flash", "impl.experts=fused"):
        assert found[key].conflict == "needs a GPU" and not on_gpu[key].conflict
    assert not found["impl.attention=math"].conflict and not found["impl.experts=loop"].conflict


def test_a_cpu_without_bf16_instructions_is_not_asked_to_emulate_them():
    for known, refused in ((False, True), (True, False), (None, False)):
        run = run_of(environment=replace(ENVIRONMENT, cpu_bf16=known))
        (bf16,) = [p for p in proposals(StepContext(run), {}) if p.key == "precision=bf16"]
        assert ("no bf16 instructions" in bf16.conflict) is refused


def test_a_change_keeps_the_other_settings():
    found = suggested("compile=blocks,precision=bf16")
    assert found["compile.optimizer=true"].recipe.label == (
        "compile=blocks,compile.optimizer=true,precision=bf16"
    )
    assert found["compile=whole"].recipe.techniques["compile"] == {"scope": "whole"}
    assert not [key for key in found if key.startswith("precision")]
    found = suggested("impl.experts=loop")
    assert found["impl.attention=math"].recipe.label == "impl.experts=loop,impl.attention=math"


def test_what_the_baseline_ran_is_not_offered_again():
    ran = Ran({"experts": ("loop",)})
    first = {"experts": "grouped"}
    assert "impl.experts=grouped" not in suggested("impl.experts=loop", ran=ran, first_impls=first)
    assert "impl.experts=grouped" in suggested("impl.experts=loop", ran=ran)


def test_the_update_is_never_made_slower():
    assert "optimizer=foreach" not in suggested(ran=replace(RAN, optimizer="fused"))
    assert "optimizer=foreach" in suggested()


def test_memory_has_its_own_offers():
    found = suggested(objective="memory")
    assert "checkpointing=blocks" in found and "optimizer=fused" not in found
    assert "checkpointing=blocks" not in suggested()


def test_a_file_dropped_on_the_shelf_is_tried(monkeypatch):
    use_techniques(monkeypatch, {"dropped_in": FakeTechnique({})})
    assert list(suggested("plain")) == ["dropped_in=true"]


@pytest.mark.parametrize(("recipe", "slow"), [("plain", False), ("compile=whole", True)])
def test_compiling_takes_long(recipe, slow):
    assert is_slow(parse_recipe(recipe)) is slow


def test_a_recipe_that_cannot_be_has_a_reason():
    both = {
        "compile": {"scope": "whole", "mode": "reduce-overhead"},
        "cuda_graph": {"scope": "step"},
    }
    assert "graphs of its own" in recipe_conflict(Recipe(both))
    assert recipe_conflict(Recipe()) == ""


def test_implementations_that_the_recipe_names_are_offered_back_all_at_once():
    ran = Ran({"attention": ("dense_mask",), "experts": ("loop",), "rotary": ("reference",)})
    named = "impl.attention=dense_mask,impl.experts=loop,impl.rotary=reference"
    found = suggested(named, on_gpu=True, ran=ran)
    bundle = found["impl.*=auto"].recipe.techniques["impl"]
    assert bundle == {"attention": "auto", "experts": "auto", "rotary": "auto"}
    assert found["impl.experts=fused"].prior == 1.0
    chosen = suggested("impl.attention=auto", on_gpu=True)
    assert "impl.*=auto" not in chosen and chosen["impl.attention=cudnn"].prior < 0.1


def test_an_implementation_that_auto_has_passed_over_comes_after_compiling():
    """All of the step in an op, against 5 % that a compiler may fuse, at three times the cost."""
    run = run_of((100.0,) * 8)
    kinds = (Category("elementwise", 5.0, 10), Category("matmul fp32", 95.0, 10))
    budget = Budget((StepBudget(0, 100.0, {"kernels": 100.0}, kinds),), on_device=False)
    run = replace(run, ran=RAN, profile=Profile((0, 1, 1, 1), ("t",), budget=budget))
    known = {"op:attention": 100.0, "op:experts": 100.0}
    found = {p.key: p for p in proposals(StepContext(run, "time", impls_of(run)), known)}
    passed_over = max(p.promise for key, p in found.items() if key.startswith("impl."))
    assert found["compile=blocks"].promise > passed_over > 0


def test_nor_does_it_come_before_what_has_no_ceiling():
    """A compiler may tune products whose roofline nobody knows."""
    known = {"op:attention": 100.0, "op:experts": 100.0}
    run = run_of((100.0,) * 8, environment=H200, device="cuda")
    compiled = replace(run.spec, recipe=parse_recipe("compile=blocks"))
    context = StepContext(
        replace(run, spec=compiled, ran=RAN), "time", impls_of(replace(run, ran=RAN))
    )
    found = {p.key: p for p in proposals(context, known)}
    passed_over = max(p.promise for key, p in found.items() if key.startswith("impl."))
    tuned = found["compile.mode=max-autotune-no-cudagraphs"]
    assert tuned.ceiling is None and tuned.promise > passed_over > 0


def test_bf16_weights_bring_their_optimizer_along():
    found = suggested("precision=bf16", on_gpu=True)
    both = found["precision=bf16-weights,optimizer=one-pass"]
    assert both.recipe == parse_recipe(both.key) and not both.conflict
    assert both.requires == ("optimizer",)
    assert "precision=bf16-weights" in suggested("precision=bf16,optimizer=one-pass", on_gpu=True)
    assert not [key for key in suggested("precision=bf16") if "weights" in key]


def test_a_graph_is_refused_where_the_host_waits():
    waits = ("grouped_mm/loop.py:34",) * 18 + ("model.py:7",)
    conflict = suggested(on_gpu=True, waits=waits)["cuda_graph=step"].conflict
    assert conflict == "the host waits for the device: grouped_mm/loop.py:34 x 18, model.py:7 x 1"
    assert suggested(on_gpu=True)["cuda_graph=step"].conflict == ""


def test_what_a_graph_break_stopped_is_offered_in_pieces():
    whole = "compile=whole,compile.fullgraph=false"
    assert whole not in suggested()
    found = suggested(failed={"compile=whole": "Unsupported: a line"})
    assert whole in found and "compile=blocks,compile.fullgraph=false" not in found
    assert "compile=whole" not in found, "it would break again"
    assert whole not in suggested(failed={"compile=whole": "RuntimeError: another fault"})
