"""Substitutions in whole models: what the Run says of them, gradients, and what is refused."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from steplab.core import Ran
from steplab.core.errors import UserError
from steplab.core.run import Substitution, run_from_json, run_to_json
from steplab.step.trial import trial
from steplab.substitute.backend import SubstitutingBackend
from steplab.substitute.feed_forward import FusedFeedForward
from steplab.substitute.norm import FusedNorm
from steplab.techniques.context import StepContext
from steplab.techniques.recipes import parse_recipe, technique
from steplab.tune.proposals import proposals
from tests.compare.sides import run_of
from tests.own_models import named
from tests.substitute.models import LanguageModel, language_batch, language_loss

FACTORY = """
import steplab
from tests.substitute.models import LanguageModel, language_batch, language_loss

def make():
    batches = lambda size: [language_batch(size, seed=s) for s in range(3)]
    return steplab.UserModel(LanguageModel(), batches, language_loss, tokens_per_sequence=16)
"""
RECIPE = "compile=loss,compile.backend=aot_eager,substitute=loss"


def gradients(model, loss, batch, autocast=False):
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = loss(model, batch)
    value.backward()
    return torch.cat([p.grad.flatten().double() for p in model.parameters()])


def errors(model, loss, batch, kinds, autocast=False):
    """Return errors of the gradients against fp64, plain and substituted, and what was found."""
    truth = gradients(copy.deepcopy(model).double(), loss, batch)
    plain = gradients(model, loss, batch, autocast)
    torch._dynamo.reset()
    backend = SubstitutingBackend(kinds).before("aot_eager")
    compiled = torch.compile(loss, backend=backend, fullgraph=True)
    ours = gradients(model, compiled, batch, autocast)
    relative = [float((g - truth).norm() / truth.norm()) for g in (plain, ours)]
    return *relative, backend.found


def replaced(found, kind):
    return sum(one.count for one in found if one.rewrite == kind and one.what)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_small_language_model_keeps_its_gradients(autocast):
    torch.manual_seed(0)
    kinds = ["attention", "loss"]
    plain, ours, found = errors(LanguageModel(), language_loss, language_batch(), kinds, autocast)
    assert ours < 1.1 * plain + 1e-8
    assert replaced(found, "loss") == 1 and replaced(found, "attention") == 0


def llama(layers=2, **options):
    transformers = pytest.importorskip("transformers", reason="not a dependency of steplab")
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "use_cache": False}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": layers}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, **options))


def causal_loss(model, batch):
    return model(input_ids=batch, labels=batch).loss


@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_transformers_lose_their_dense_mask_and_repeated_keys(autocast):
    model = llama()
    batch = torch.randint(0, 97, (3, 16), generator=torch.Generator().manual_seed(0))
    kinds = ["attention", "loss"]
    plain, ours, found = errors(model, causal_loss, batch, kinds, autocast)
    assert ours < 1.1 * plain + 1e-8
    assert replaced(found, "attention") == 2 and replaced(found, "loss") == 1
    assert any(one.what == "is_causal, 2 heads of keys for 4" for one in found)
    assert all("transformers/" in one.place for one in found)


def test_packed_sequences_keep_their_mask():
    """Positions that start again say where a document begins; they are an input."""
    model = llama(layers=1)
    positions = torch.cat([torch.arange(6), torch.arange(10)]).expand(2, 16)
    batch = torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(0))

    def loss(model, batch):
        return model(input_ids=batch, labels=batch, position_ids=positions).loss

    plain, ours, found = errors(model, loss, batch, ["attention"])
    assert ours < 1.1 * plain + 1e-8 and not replaced(found, "attention")


@pytest.mark.parametrize("recipe", [RECIPE, "substitute=loss"])
def test_the_run_lists_places_counts_and_proofs(tiny_spec, tmp_path, recipe, monkeypatch):
    monkeypatch.setattr("steplab.substitute.lazy_logits.AMPLIFIED", 2)
    (tmp_path / "own.py").write_text(FACTORY)
    spec = replace(tiny_spec(recipe), workload=named(f"{tmp_path}/own.py:make"), config={})
    run = trial(spec)
    assert run.status == "ok", run.reason
    (one,) = run.substitutions
    assert one.rewrite == "loss" and one.what == "cross_entropy chunked" and one.count == 1
    assert one.place.startswith("tests/substitute/models.py:") and "fp64" in one.proof
    assert run.ran.own_ops["steplab::chunked_cross_entropy_mean"] == 1
    assert "substituted loss x 1 (cross_entropy chunked)" in run.notes
    assert run_from_json(run_to_json(run)) == run


def test_names_of_parameters_stay():
    import steplab

    model = LanguageModel()
    names = list(model.state_dict())
    steplab.optimize(model, language_loss, RECIPE)([language_batch()])
    assert list(model.state_dict()) == names


def test_what_was_asked_for_and_not_replaced_fails_the_run(tiny_spec, tmp_path):
    (tmp_path / "own.py").write_text(FACTORY)
    spec = tiny_spec("compile=blocks,compile.backend=aot_eager,substitute=attention")
    run = trial(replace(spec, workload=named(f"{tmp_path}/own.py:make"), config={}))
    assert run.status == "failed"
    assert run.reason == "Nothing was replaced by substitute=attention: there is no place for it."


def test_fewer_than_planned_fail_the_run():
    settings = {"kinds": "loss"}
    planned = Substitution("loss", "model.py:1 (f)", "chunked", "fp64 0", count=2)
    run = replace(
        run_of(), substitutions=(planned,), ran=Ran(own_ops={"steplab::x_cross_entropy": 1})
    )
    mismatch = technique("substitute").mismatch(settings, run)
    assert mismatch == "substitute replaced loss in 2 places, but 1 ran in a step"
    both = replace(run, ran=Ran(own_ops={"steplab::x_cross_entropy": 2}))
    assert technique("substitute").mismatch(settings, both) == ""
    left = Substitution("loss", "model.py:1 (f)", reason="its head has a bias")
    alone = technique("substitute").mismatch(settings, replace(run, substitutions=(left,)))
    assert alone.endswith("by substitute=loss: its head has a bias (model.py:1 (f))")


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("substitute=all", "needs compile"),
        ("compile=blocks,substitute=loss", "compile=loss has them"),
        ("compile=loss,substitute=attentoin", "attention"),
    ],
)
def test_what_cannot_be_is_refused(recipe, said):
    with pytest.raises(UserError) as caught:
        parse_recipe(recipe)
    assert said in str(caught.value)


def test_tune_offers_substitutions_for_compiled_models_of_ones_own():
    def offered(recipe, **fields):
        context = StepContext(run_of(recipe=parse_recipe(recipe).techniques, **fields))
        return {p.key for p in proposals(context, {}) if p.technique == "substitute"}

    own = {"source": "0123456789ab"}
    assert offered("compile=loss", **own) == {"substitute=all"} == offered("compile=blocks", **own)
    assert not offered("compile=loss,substitute=all", **own)
    on_a_gpu = offered("compile=loss,substitute=all", device="cuda", **own)
    assert on_a_gpu == {"substitute=all+norm"}
    assert not offered("compile=loss,substitute=all+norm", device="cuda", **own)
    assert not offered("compile=loss") and not offered("plain", source="0123456789ab")
    assert offered("compile=loss,substitute=experts", **own) == {"substitute=all"}


def test_tune_offers_what_needs_no_compiler_where_a_graph_broke():
    def offered(recipe, failed):
        run = run_of(recipe=parse_recipe(recipe).techniques, source="0123456789ab")
        context = StepContext(run, failed=dict.fromkeys(failed, "Unsupported: a line"))
        return {p.key for p in proposals(context, {}) if p.technique == "substitute"}

    assert offered("plain", ["compile=blocks"]) == {"substitute=experts", "substitute=loss"}
    assert not offered("plain", []) and not offered("substitute=experts", ["compile=blocks"])


@pytest.mark.slow
def test_through_inductor():
    torch.manual_seed(0)
    model, batch = LanguageModel(layers=1), language_batch()
    plain = gradients(model, language_loss, batch)
    backend = SubstitutingBackend(["attention", "loss"])
    ours = gradients(model, torch.compile(language_loss, backend=backend, fullgraph=True), batch)
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)
    assert replaced(backend.found, "loss") == 1


@pytest.mark.parametrize("autocast", [False, True])
def test_norms_and_the_additions_before_them_are_replaced_where_a_kernel_takes_them(autocast):
    """By the definition, which a CPU can run; Triton's kernels refuse a CPU, with the reason."""
    torch.manual_seed(0)
    model, batch = LanguageModel(), language_batch()
    plain = gradients(model, language_loss, batch, autocast)
    backend = SubstitutingBackend(["loss", "norm"]).before("aot_eager")
    backend.rewrites = {**backend.rewrites, "norm": FusedNorm("reference")}
    compiled = torch.compile(language_loss, backend=backend, fullgraph=True)
    ours = gradients(model, compiled, batch, autocast)
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-3 if autocast else 1e-6)
    norms = [one for one in backend.found if one.rewrite == "norm"]
    whats = [one.what for one in norms for _ in range(one.count)]
    # Positions are broadcast: that addition is not of two streams.
    assert sorted(whats) == ["add and layer_norm reference"] * 4 + ["layer_norm reference"]
    # Rounded as autocast rounds for the product behind each, head and loss among them.
    rounding = [float(one.proof.split()[-1]) > 1e-3 for one in norms]
    assert rounding == [autocast] * len(norms)
    if not torch.cuda.is_available():
        torch._dynamo.reset()
        alone = SubstitutingBackend(["norm"]).before("eager")
        torch.compile(language_loss, backend=alone)(model, batch)
        assert not replaced(alone.found, "norm")
        assert all("'triton_norm' needs" in one.reason for one in alone.found)


@pytest.mark.parametrize("autocast", [False, True])
def test_feed_forward_networks_are_replaced_where_a_kernel_takes_them(autocast):
    """By the definition, which a CPU can run; the kernel refuses a CPU, with the reason."""
    torch.manual_seed(0)
    batch = torch.randn(3, 5, 8)
    layers = [nn.Sequential(nn.Linear(8, 32, bias=False), nn.GELU(), nn.Linear(32, 8, bias=False))]
    model = nn.Sequential(nn.LayerNorm(8), *layers, *copy.deepcopy(layers))

    def loss(model, x):
        return model(x).float().square().mean()

    truth = gradients(copy.deepcopy(model).double(), loss, batch.double())
    plain = gradients(model, loss, batch, autocast)
    backend = SubstitutingBackend(["feed_forward"]).before("aot_eager")
    backend.rewrites = {"feed_forward": FusedFeedForward("reference")}
    ours = gradients(model, torch.compile(loss, backend=backend, fullgraph=True), batch, autocast)
    assert (ours - truth).norm() < 1.5 * (plain - truth).norm() + 1e-9
    assert replaced(backend.found, "feed_forward") == 2
    torch._dynamo.reset()
    both = SubstitutingBackend(["feed_forward", "norm"]).before("aot_eager")
    both.rewrites = {**backend.rewrites, "norm": FusedNorm("reference")}
    ours = gradients(model, torch.compile(loss, backend=both, fullgraph=True), batch, autocast)
    assert (ours - truth).norm() < 1.5 * (plain - truth).norm() + 1e-9
    # The norm before a network rounds for it: nothing else takes what it writes.
    norm = next(one for one in both.found if one.rewrite == "norm" and one.what)
    assert (float(norm.proof.split()[-1]) > 1e-3) == autocast
    if not torch.cuda.is_available():
        torch._dynamo.reset()
        alone = SubstitutingBackend(["feed_forward"]).before("eager")
        torch.compile(loss, backend=alone)(model, batch)
        assert all("'in_product_kept' needs" in one.reason for one in alone.found)


def test_an_operand_is_not_written_out_by_an_older_torch(monkeypatch):
    from torch._inductor.exc import OperatorIssue
    from torch.torch_version import TorchVersion

    class Long:
        def __str__(self):
            raise AssertionError("written out")

    monkeypatch.setattr(OperatorIssue, "operator_str", staticmethod(OperatorIssue.operator_str))
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    SubstitutingBackend(["loss"])
    assert OperatorIssue.operator_str("aten.add", [Long()], {}) == "target: aten.add"


def test_a_form_that_breaks_a_rewrite_does_not_break_the_model():
    class Broken:
        def find(self, graph):
            raise IndexError("tuple index out of range")

    backend = SubstitutingBackend([]).before("eager")
    backend.rewrites = {"loss": Broken()}
    model, batch = LanguageModel(), language_batch()
    loss = torch.compile(language_loss, backend=backend)(model, batch)
    assert torch.equal(loss, language_loss(model, batch))
    assert backend.found[0].reason == "not read: IndexError: tuple index out of range"
