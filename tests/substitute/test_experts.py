"""Experts of foreign mixtures by the registry of their library: the same, or left alone."""

import contextlib
import copy
import sys
from dataclasses import replace

import pytest
import torch

import steplab
from steplab.core import Ran
from steplab.core.errors import Unsupported, UserError
from steplab.core.run import Substitution
from steplab.step.trial import trial
from steplab.substitute.experts import MODULE_REWRITE, NAME
from steplab.techniques.recipes import parse_recipe, technique
from tests.compare.sides import run_of
from tests.own_models import named
from tests.substitute import mixtures
from tests.substitute.mixtures import Config, Experts, Mixture

PLAIN = contextlib.nullcontext


def bf16():
    return torch.autocast("cpu", torch.bfloat16)


@pytest.fixture
def interface(monkeypatch):
    """Transformers' registry, by a stand-in."""
    torch.manual_seed(0)
    return mixtures.install(monkeypatch)


def gradients(model, x, context=PLAIN):
    model.zero_grad()
    x = x.clone().requires_grad_()
    with context():
        value = model(x)
    along = torch.linspace(-1, 1, value.numel()).view_as(value)
    value.backward(along.to(value))
    return [value.detach(), x.grad, *(p.grad for p in model.parameters())]


def tokens(count=40, width=16):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_experts_are_replaced_and_compute_the_same_in_fp64(interface, implementation):
    config = Config()
    model = Mixture(config, Experts, Experts).double()
    plain = gradients(model, tokens().double())
    config._experts_implementation = implementation
    names = list(model.state_dict())
    first, second = MODULE_REWRITE.replace(model, PLAIN)
    assert first == second and first.what == "experts grouped" and "fp64" in first.proof
    assert first.place.startswith("tests/substitute/mixtures.py:") and "forward" in first.place
    assert config._experts_implementation == NAME and NAME in interface.functions
    for ours, theirs in zip(gradients(model, tokens().double()), plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("wide", [True, False])  # weights in fp32, or in bf16 too
def test_under_autocast_they_round_as_the_code_of_the_class_does(interface, wide):
    config = Config()
    model = Mixture(config, Experts)
    model = model if wide else model.bfloat16()
    x = tokens() if wide else tokens().bfloat16()
    truth = gradients(copy.deepcopy(model).double(), x.double())
    plain = gradients(model, x, bf16)
    (one,) = MODULE_REWRITE.replace(model, bf16)
    assert one.what, one.reason
    ours = gradients(model, x, bf16)
    assert [t.dtype for t in ours] == [t.dtype for t in plain]
    for a, b, exact in zip(ours, plain, truth, strict=True):
        off, honest = ((t.double() - exact).norm() for t in (a, b))
        assert off <= 2 * honest + 1e-6


@pytest.mark.parametrize("kind", mixtures.NEAR_MISSES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("context", [PLAIN, bf16])
def test_what_is_something_else_is_left_alone(interface, kind, context):
    config = Config()
    (one,) = MODULE_REWRITE.replace(kind(config), context)
    assert not one.what and not one.proof and mixtures.NEAR_MISSES[kind] in one.reason
    assert config._experts_implementation == "eager"


def test_experts_that_return_another_dtype_are_left_alone(interface):
    (one,) = MODULE_REWRITE.replace(mixtures.Wide(Config()).bfloat16(), PLAIN)
    assert one.reason == "results would be of torch.bfloat16 and not of torch.float32"


def test_an_implementation_that_was_chosen_on_purpose_stays(interface):
    (one,) = MODULE_REWRITE.replace(Experts(Config("sonicmoe")), PLAIN)
    assert one.reason == "the model asks for 'sonicmoe'"


def test_a_class_with_another_registry_is_left_alone(interface):
    class Elsewhere(Experts):
        interface = mixtures.Interface()

    (one,) = MODULE_REWRITE.replace(Elsewhere(Config()), PLAIN)
    assert one.reason == "could not be run: KeyError: 'steplab'"


def test_one_config_decides_for_all_its_experts(interface):
    config, other = Config(), Config()
    model = torch.nn.ModuleList([Experts(config), mixtures.GeluGate(config), Experts(other)])
    good, bad, apart = MODULE_REWRITE.replace(model, PLAIN)
    assert good.reason == "other experts of its config cannot be replaced"
    assert bad.reason.startswith("not the same") and apart.what
    assert config._experts_implementation == "eager" and other._experts_implementation == NAME


def test_without_transformers_nothing_is_looked_at(monkeypatch):
    monkeypatch.delitem(sys.modules, "transformers.integrations.moe", raising=False)
    assert MODULE_REWRITE.replace(Mixture(Config(), Experts), PLAIN) == []


FACTORY = """
import steplab, torch, pytest
from tests.substitute import mixtures

def make():
    mixtures.install(pytest.MonkeyPatch())
    batches = lambda size: [torch.randn(8 * size, 16) for _ in range(3)]
    model = mixtures.Mixture(mixtures.Config(), mixtures.Experts, mixtures.Experts)
    return steplab.UserModel(model, batches, lambda model, x: model(x).square().mean(), 8)
"""


@pytest.mark.parametrize("recipe", ["substitute=experts", "precision=bf16,substitute=experts"])
def test_the_run_lists_them_without_a_compiler(tiny_spec, tmp_path, recipe, interface):
    (tmp_path / "own.py").write_text(FACTORY)
    spec = replace(tiny_spec(recipe), workload=named(f"{tmp_path}/own.py:make"), config={})
    run = trial(spec)
    assert run.status == "ok", run.reason
    (one,) = run.substitutions
    assert (one.rewrite, one.what, one.count) == ("experts", "experts grouped", 2)
    assert "substituted experts x 2 (experts grouped)" in run.notes


def test_compiled_with_its_masks_and_loss_it_is_one_graph(interface):
    model, x = Mixture(Config(), Experts, Experts), tokens()
    plain = gradients(model, x)
    tuned = steplab.optimize(
        model,
        lambda model, x: model(x).square().mean(),
        "compile=loss,compile.backend=aot_eager,substitute=experts",
    )
    found = tuned.loss(x).loss
    assert found.item() == pytest.approx(plain[0].square().mean().item(), rel=1e-5)
    assert [one.count for one in tuned.parts.substituting.found] == [2]


def test_a_model_without_experts_is_refused_at_once():
    with pytest.raises(Unsupported, match="no modules for substitute=experts"):
        steplab.optimize(torch.nn.Linear(2, 2), lambda m, x: m(x).mean(), "substitute=experts")


def test_fewer_than_planned_fail_the_run():
    planned = Substitution("experts", "m.py:1 (f)", "experts fused", "fp64 0", count=2)
    run = replace(run_of(), substitutions=(planned,), ran=Ran())
    said = technique("substitute").mismatch({"kinds": "experts"}, run)
    assert said == "substitute replaced experts in 2 places, but 0 ran in a step"
    ops = {"steplab::fused_experts": 2, "steplab::fused_experts_backward": 2}
    both = replace(run, ran=Ran(own_ops=ops))
    assert technique("substitute").mismatch({"kinds": "experts"}, both) == ""


def test_experts_need_no_compiler_but_graphs_do():
    assert parse_recipe("substitute=experts").techniques
    with pytest.raises(UserError, match="attention needs compile"):
        parse_recipe("substitute=attention+experts")


SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "use_cache": False,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Qwen2Moe", "Qwen3Moe", "Mixtral"])
@pytest.mark.parametrize("context", [PLAIN, bf16])
def test_mixtures_of_transformers_keep_their_gradients(kind, context):
    """The whole model in one graph, with its masks and its loss, against fp64."""
    transformers = pytest.importorskip("transformers", reason="not a dependency of steplab")
    from steplab.substitute.backend import SubstitutingBackend

    count = "num_local_experts" if kind == "Mixtral" else "num_experts"
    config = getattr(transformers, f"{kind}Config")(
        **SIZES, **{count: 4}, num_experts_per_tok=2, experts_implementation="eager"
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    batch = torch.randint(0, 97, (3, 16), generator=torch.Generator().manual_seed(0))

    def loss(model, batch):
        return model(input_ids=batch, labels=batch).loss

    def found(model, call, context):
        model.zero_grad()
        with context():
            value = call(model, batch)
        value.backward()
        return torch.cat([p.grad.flatten().double() for p in model.parameters()])

    truth = found(copy.deepcopy(model).double(), loss, PLAIN)
    plain = found(model, loss, context)
    entries = MODULE_REWRITE.replace(model, context)
    backend = SubstitutingBackend(["attention", "loss"], entries).before("aot_eager")
    torch._dynamo.reset()
    ours = found(model, torch.compile(loss, backend=backend, fullgraph=True), context)
    off, honest = (float((g - truth).norm() / truth.norm()) for g in (ours, plain))
    assert off < 1.2 * honest + 1e-8
    counts = {one.rewrite: one.count for one in backend.found if one.what}
    assert counts == {"experts": 2, "attention": 2, "loss": 1}
