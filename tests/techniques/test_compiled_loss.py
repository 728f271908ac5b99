"""`compile=loss`: model and loss are one graph, and only the loss leaves it."""

from dataclasses import replace

import pytest
import torch

import steplab
from steplab.core.errors import UserError
from steplab.step.trial import trial
from steplab.techniques.context import StepContext
from steplab.techniques.recipes import parse_recipe
from steplab.tune.proposals import proposals
from tests.compare.sides import run_of
from tests.own_models import named
from tests.substitute.models import LanguageModel, V, language_batch, language_loss

FACTORY = """
import steplab
from tests.substitute.models import LanguageModel, language_batch, language_loss

def make():
    batches = lambda size: [language_batch(size, seed=s) for s in range(3)]
    return steplab.UserModel(LanguageModel(), batches, language_loss, tokens_per_sequence=16)
"""


def gradients(recipe: str, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Run one step of `model` and return its gradients, which the step itself drops."""
    kept = {}
    hooks = [
        p.register_post_accumulate_grad_hook(
            lambda p, name=name: kept.update({name: p.grad.clone()})
        )
        for name, p in model.named_parameters()
    ]
    steplab.optimize(model, language_loss, recipe, mode="forward+backward")([language_batch()])
    for hook in hooks:
        hook.remove()
    return kept


def test_only_the_loss_leaves_the_graph():
    """Compiled alone, the model returns its logits; compiled with the loss it does not."""
    left = []

    def backend(graph, inputs):
        (outputs,) = next(node.args for node in graph.graph.nodes if node.op == "output")
        left.append([tuple(node.meta["example_value"].shape) for node in outputs])
        return graph.forward

    model, batch = LanguageModel(), language_batch()
    workload = steplab.optimize(model, language_loss, "plain").workload
    torch.compile(model, backend=backend, fullgraph=True)(*batch)
    torch.compile(workload.loss, backend=backend, fullgraph=True)(model, batch)
    assert left == [[(3, 16, V), ()], [()]]


def test_gradients_are_those_of_the_plain_step():
    torch.manual_seed(0)
    model = LanguageModel()
    names = list(model.state_dict())
    plain = gradients("plain", model)
    compiled = gradients("compile=loss,compile.backend=aot_eager", model)
    torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-6)
    assert list(model.state_dict()) == names


def test_own_and_built_in_models_are_measured(tiny_spec, tmp_path):
    recipe = "compile=loss,compile.backend=aot_eager"
    (tmp_path / "own.py").write_text(FACTORY)
    own = replace(tiny_spec(recipe, batch=2), workload=named(f"{tmp_path}/own.py:make"), config={})
    for spec in (tiny_spec(recipe), own, replace(own, mode="infer")):
        run = trial(spec)
        assert run.status == "ok", run.reason
        assert run.compilation.graphs == 1 and not run.compilation.breaks


def test_a_scheme_that_wraps_or_gathers_cannot_be_inside():
    for scheme in ("ddp", "fsdp"):
        with pytest.raises(UserError, match="graph of"):
            parse_recipe(f"compile=loss,parallel={scheme}")


def test_models_of_ones_own_are_offered_the_loss_and_built_in_ones_the_model():
    def offered(**fields):
        recipe = fields.pop("recipe", {})
        failed = fields.pop("failed", {})
        context = StepContext(run_of(recipe=recipe, **fields), failed=failed)
        return {p.key for p in proposals(context, {}) if p.technique == "compile"}

    assert {"compile=blocks", "compile=whole"} <= offered() and "compile=loss" not in offered()
    own = offered(source="0123456789ab")
    assert {"compile=blocks", "compile=loss"} <= own and "compile=whole" not in own
    blocks = parse_recipe("compile=blocks").techniques
    assert "compile=loss" in offered(source="0123456789ab", recipe=blocks)


def test_what_a_graph_break_stops_is_compiled_in_pieces_and_what_inductor_refuses_is_not():
    """Pieces of the loss hold the model, whole where it does not break: it need not be tried."""

    def offered(reason):
        context = StepContext(run_of(source="0123456789ab"), failed={"compile=loss": reason})
        return {p.key for p in proposals(context, {}) if p.technique == "compile"}

    pieces = "compile=loss,compile.fullgraph=false"
    assert offered("Unsupported: a line") == {"compile=blocks", pieces}
    refused = offered("InductorError: no such kernel")
    assert refused == {"compile=blocks", "compile=loss", "compile=whole"}
