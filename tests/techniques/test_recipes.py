import json

import pytest

from steplab.core import PLAIN, Recipe, registry
from steplab.core.errors import UserError
from steplab.techniques.recipes import check_recipe, parse_recipe, technique
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
        ("compile=blocks,compile.backend=eager,compile.mode=max-autotune", "has no meaning"),
        ("precision=", "not technique=value"),
        ("compile.mod=default", "Did you mean 'mode'"),
        ("compile.fullgraph=yes", "true or false"),
        ("impl=flash", "needs an op"),
        ("impl.attention=falsh", "Did you mean 'flash'"),
        ("impl.atention=flash", "Did you mean 'attention'"),
        ("nowhere.toml", "no recipe file"),
    ],
)
def test_misspelt_words(text, words):
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
        ("[precision\n", "cannot be read"),
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
