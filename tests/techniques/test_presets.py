"""Recipes by name, words that change them, and how they are refused."""

import pytest
import torch

from steplab.core import Recipe
from steplab.core.errors import Unsupported, UserError
from steplab.step.assemble import assemble, micro_batches
from steplab.techniques.recipes import check_recipe, parse_recipe, presets, technique


def test_every_preset_is_a_recipe_whose_label_reads_back():
    assert presets() == ["development", "flagship", "production-inference", "production-training"]
    for name in presets():
        recipe = parse_recipe(name)
        check_recipe(recipe)
        assert parse_recipe(recipe.label) == recipe


def test_words_change_a_preset():
    recipe = parse_recipe("production-training,compile.mode=max-autotune-no-cudagraphs")
    assert recipe.techniques["compile"] == {"scope": "blocks", "mode": "max-autotune-no-cudagraphs"}
    assert recipe.techniques["precision"] == {"dtype": "bf16"}
    assert "compile" not in parse_recipe("production-training,compile=off").techniques
    added = parse_recipe("production-training,cuda_graph=step")
    assert added.techniques["cuda_graph"] == {"scope": "step"}


def test_words_change_a_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[compile]\nscope = "whole"\n')
    recipe = parse_recipe(f"{path},precision=bf16")
    assert recipe.techniques == {"compile": {"scope": "whole"}, "precision": {"dtype": "bf16"}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("production-trainin", "Presets: development"),
        ("production-training,prefetch=off", "no prefetch to take out of 'production-training'"),
        ("development,precision", "not technique=value"),
        ("production-inference,compile.mode=reduce-overhead", "graphs of its own"),
    ],
)
def test_slips_of_the_pen(text, words):
    with pytest.raises(UserError, match=words):
        parse_recipe(text)


def test_a_file_is_checked_as_words_are(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text('[cuda_graph]\n[compile]\nmode = "reduce-overhead"\n')
    with pytest.raises(UserError, match="graphs of its own"):
        parse_recipe(str(path))


@pytest.mark.parametrize("name", ["development", "production-training"])
def test_presets_that_run_anywhere(tiny_spec, name):
    spec = tiny_spec(f"{name},compile.backend=eager" if "training" in name else name)
    step = assemble(spec)
    assert torch.isfinite(step(next(micro_batches(step, spec))).loss)


def test_inference_asks_for_a_gpu_and_says_what_to_leave_out(tiny_spec):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(Unsupported, match="Add cuda_graph=off"):
        assemble(tiny_spec("production-inference", mode="infer"))
    assemble(tiny_spec("production-inference,cuda_graph=off", mode="infer"))


def test_a_technique_that_needs_another_says_so(monkeypatch):
    monkeypatch.setattr(type(technique("prefetch")), "needs", ("optimizer",))
    with pytest.raises(UserError, match="prefetch needs optimizer"):
        check_recipe(Recipe({"prefetch": {"batches": 2}}))
    check_recipe(Recipe({"prefetch": {"batches": 2}, "optimizer": {"impl": "fused"}}))
