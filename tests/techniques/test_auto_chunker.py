"""compile.auto_chunker: head and loss in chunks by Inductor, where this torch can."""

from dataclasses import replace

import pytest
import torch._functorch.config
import torch._inductor.config

from steplab.core import Compilation, Ran
from steplab.core.errors import Unsupported, UserError
from steplab.core.run import Substitution
from steplab.probes.compilation import chunked_graphs
from steplab.step.assemble import assemble, micro_batches
from steplab.techniques.compile import TECHNIQUE, chunker_options
from steplab.techniques.context import StepContext
from steplab.techniques.recipes import parse_recipe
from tests.compare.sides import run_of

HERE = hasattr(torch._inductor.config, "auto_chunker")
needs_chunker = pytest.mark.skipif(not HERE, reason="this torch has no auto_chunker")
RECIPE = "compile=whole,compile.auto_chunker=true"


@needs_chunker
def test_what_it_sets_ends_with_the_recipe(tiny_spec):
    assemble(tiny_spec(RECIPE))
    assert not torch._functorch.config.enable_autograd_cache, "a graph from it would not be counted"
    assemble(tiny_spec())
    assert torch._functorch.config.enable_autograd_cache
    assert not torch._inductor.config.auto_chunker.enable


@needs_chunker
def test_modes_and_substitutions_keep_theirs(tiny_spec):
    """The options go to torch.compile, or to the backend that substitutes first."""
    more = "compile.mode=max-autotune-no-cudagraphs"
    with pytest.MonkeyPatch.context() as patch:
        asked = []
        patch.setattr("torch.nn.Module.compile", lambda self, **options: asked.append(options))
        assemble(tiny_spec(f"{RECIPE},{more}"))
        step = assemble(tiny_spec(f"{RECIPE},{more},substitute=all"))
    (first, second) = asked
    wanted = {"auto_chunker.enable": True, "max_autotune": True}
    assert wanted.items() <= first["options"].items() and "mode" not in first
    assert second["backend"] is step.parts.substituting
    assert wanted.items() <= step.parts.substituting.config.items()


def test_a_torch_without_it_refuses_with_the_reason(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("torch._inductor.config", object())
        with pytest.raises(Unsupported, match="has no auto_chunker"):
            chunker_options()


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("compile=blocks,compile.auto_chunker=true", "the graphs of blocks have neither"),
        (f"{RECIPE},compile.backend=aot_eager", "Inductor's"),
    ],
)
def test_refusals(recipe, words):
    with pytest.raises(UserError, match=words):
        parse_recipe(recipe)


def test_a_compiler_that_cuts_nothing_fails_the_run():
    run = run_of(recipe=parse_recipe(RECIPE).techniques)
    settings = run.spec.recipe.techniques["compile"]
    run = replace(run, ran=Ran(), compilation=Compilation(2, 0))
    assert "cut nothing into chunks" in TECHNIQUE.mismatch(settings, run)
    run = replace(run, compilation=Compilation(2, 0, chunked=1))
    assert TECHNIQUE.mismatch(settings, run) == ""


def test_tune_offers_it_where_the_loss_is_in_the_graph_and_whole():
    def offered(recipe, **changes):
        techniques = parse_recipe(recipe).techniques
        run = replace(run_of(recipe=techniques, mode="full"), **changes)
        found = TECHNIQUE.suggest(StepContext(run), techniques["compile"])
        added = {"auto_chunker": True}.items() - techniques["compile"].items()
        return [s for s in found if added and added <= s.settings.items()]

    (offer,) = offered("compile=loss")
    assert offer.settings["scope"] == "loss" and offer.savings["memory:activations"] > 0.5
    assert not offered("compile=blocks") and not offered(RECIPE)
    in_chunks = (Substitution("loss", "model.py:3", "cross_entropy chunked"),)
    assert not offered("compile=loss,substitute=all", substitutions=in_chunks)
    assert offered("compile=loss,substitute=all", substitutions=())


@needs_chunker
@pytest.mark.slow
def test_a_large_head_is_cut_and_gradients_stay(tiny_spec):
    """256 tokens x 8,192 words: 2 million logits from 16 numbers each."""
    large = {"vocab_size": 8192, "context": 64, "width": 16, "ff_width": 16, "layers": 1}
    torch._dynamo.reset()
    gradients, before = [], chunked_graphs()
    for recipe in ("plain", RECIPE):
        spec = tiny_spec(recipe, large, batch=4)
        step = assemble(spec)
        loss, _ = step.workload.loss(step.model, next(micro_batches(step, spec))[0])
        loss.backward()
        gradients.append({n: p.grad for n, p in step.model.named_parameters()})
    assert chunked_graphs() == before + 1
    for name, plain in gradients[0].items():
        off = (gradients[1][name] - plain).norm() / plain.norm()
        assert off < 256 * 2**-24, name  # a sum over 256 tokens, each rounded once
