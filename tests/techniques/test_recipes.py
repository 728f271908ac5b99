"""Recipes by words, by name and from files; words that change them, and how they are refused."""

import json

import pytest
import torch

from steplab.core import PLAIN, Recipe, registry
from steplab.core.errors import Unsupported, UserError
from steplab.step.assemble import assemble, micro_batches
from steplab.techniques.recipes import check_recipe, parse_recipe, presets, technique
from steplab.techniques.technique import Stage, Technique


@pytest.mark.parametrize(
    ("text", "techniques"),
    [
        ("precision=bf16", {"precision": {"dtype": "bf16"}}),
        ("compile=whole,compile.fullgraph=false",
         {"compile": {"scope": "whole", "fullgraph": False}}),
        ("compile.mode=max-autotune", {"compile": {"scope": "blocks", "mode": "max-autotune"}}),
        ("impl.attention=flash", {"impl": {"attention": "flash"}}),
        ("optimizer=fused, precision=fp16",
         {"optimizer": {"impl": "fused"}, "precision": {"dtype": "fp16"}}),
    ],
)  # fmt: skip
def test_words(text, techniques):
    recipe = parse_recipe(text)
    assert recipe.techniques == techniques
    assert parse_recipe(recipe.label) == recipe


def test_plain():
    assert parse_recipe("plain") is PLAIN


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("precison=bf16", "Did you mean 'precision'"),
        ("precision=bf17", "Did you mean 'bf16'"),
        ("precision", "not technique=value"),
        ("precision=bf16,precision=fp16", "twice"),
        ("impl.attention=flash,impl.attention=math", "twice"),
        (",".join(["precision=bf16"] * 1000), r"^.{,400}$"),
        ("precision" * 1000, r"^.{,600}$"),
        ("compile=blocks,compile.backend=eager,compile.mode=max-autotune", "has no meaning"),
        ("precision=", "not technique=value"),
        ("compile.mod=default", "Did you mean 'mode'"),
        ("compile.fullgraph=yes", "true or false"),
        ("impl=flash", "needs an op"),
        ("impl.attention=falsh", "Did you mean 'flash'"),
        ("impl.atention=flash", "Did you mean 'attention'"),
        ("nowhere.toml", "no file nowhere"),
    ],
)
def test_misspelled_words(text, words):
    with pytest.raises(UserError, match=words):
        parse_recipe(text)


def test_a_file_in_any_order_has_a_label_that_reads_back(tmp_path):
    path = tmp_path / "odd.toml"
    path.write_text('[compile]\nmode = "max-autotune"\nscope = "whole"\n[precision]\n')
    recipe = parse_recipe(str(path))
    assert recipe.label == "compile=whole,compile.mode=max-autotune,precision=fp32"
    assert parse_recipe(recipe.label) == recipe


def test_files(tmp_path):
    toml = tmp_path / "fast.toml"
    toml.write_text('[precision]\ndtype = "bf16"\n[compile]\nscope = "whole"\n')
    as_json = tmp_path / "fast.json"
    as_json.write_text(json.dumps({"precision": {"dtype": "bf16"}, "compile": {"scope": "whole"}}))
    assert parse_recipe(str(toml)) == parse_recipe(str(as_json))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[precision]\ndtype = 3\n", "precision.dtype is 3"),
        ("[precision]\ndtpye = 'bf16'\n", "Did you mean 'dtype'"),
        ("precision = 'bf16'\n", "one table of settings"),
        ("[precision\n", "is not TOML"),
        ("[nothing]\n", "no technique"),
    ],
)
def test_bad_files(tmp_path, text, words):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        parse_recipe(str(path))


def test_conflicts_are_refused(monkeypatch):
    monkeypatch.setattr(type(technique("optimizer")), "excludes", ("compile",))
    with pytest.raises(UserError, match="cannot be used together"):
        check_recipe(Recipe({"optimizer": {"impl": "fused"}, "compile": {"scope": "blocks"}}))


@pytest.mark.parametrize("name", registry.names("steplab.techniques", "TECHNIQUE"))
def test_every_technique_keeps_the_contract(name):
    found = technique(name)
    assert isinstance(found, Technique) and isinstance(found.stage, Stage)
    assert type(found).__doc__ and type(found).__doc__ != Technique.__doc__


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
        ("optimizer=foreach,compile=blocks,compile.optimizer=true", "takes no rate that can"),
        ("production-training,prefetch=off", "no prefetch to take out of 'production-training'"),
        ("development,precision", "not technique=value"),
        ("production-inference,compile.mode=reduce-overhead", "graphs of its own"),
    ],
)
def test_typos_are_reported(text, words):
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
