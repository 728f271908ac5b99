"""Packed attention in whole models, with the rewrite of masks before it, and where it pays."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from steplab.core import Ran
from steplab.core.run import Substitution
from steplab.substitute import packed_attention
from steplab.substitute.backend import SubstitutingBackend
from steplab.substitute.packed_attention import PackedAttention, does_not_pay
from steplab.techniques.recipes import technique
from steplab.techniques.substitute import kinds_of_all
from tests.compare.sides import run_of
from tests.substitute.models import LanguageModel, language_batch, language_loss
from tests.substitute.test_substitute import causal_loss, errors, gradients, replaced

KIND = "packed_attention"
BY_DEFINITION = PackedAttention("reference")  # which a CPU can run
NANOGPT = (16, 12, 1024, 64)


@pytest.fixture
def by_definition(monkeypatch):
    monkeypatch.setattr(packed_attention, "REWRITE", BY_DEFINITION)


def test_a_small_language_model_keeps_its_gradients(by_definition):
    torch.manual_seed(0)
    kinds = ["attention", KIND]
    plain, ours, found = errors(LanguageModel(), language_loss, language_batch(), kinds)
    assert ours < 1.1 * plain + 1e-8
    assert replaced(found, KIND) == 2 and replaced(found, "attention") == 0
    assert found[0].place.startswith("tests/substitute/models.py:")


def gpt2(**options):
    transformers = pytest.importorskip("transformers", reason="not a dependency of steplab")
    sizes = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
    drops = {f"{name}_pdrop": 0.0 for name in ("attn", "embd", "resid")}
    torch.manual_seed(0)
    config = transformers.GPT2Config(**{**sizes, **drops, "use_cache": False, **options})
    model = transformers.GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"  # its own, of which it warns in the middle of a graph
    return model


def test_gpt2_of_transformers_first_loses_its_mask(by_definition):
    batch = torch.randint(0, 97, (3, 16), generator=torch.Generator().manual_seed(0))
    plain, ours, found = errors(gpt2(), causal_loss, batch, ["attention", KIND])
    assert ours < 1.1 * plain + 1e-8
    assert replaced(found, KIND) == 2
    assert all(one.proof for one in found if one.rewrite == KIND)


def test_gpt2_with_dropout_in_its_attention_is_left_alone(by_definition):
    batch = torch.randint(0, 97, (3, 16), generator=torch.Generator().manual_seed(0))
    backend = SubstitutingBackend(["attention", KIND]).before("aot_eager")
    torch._dynamo.reset()
    torch.compile(causal_loss, backend=backend)(gpt2(attn_pdrop=0.1), batch).backward()
    left = [one.reason for one in backend.found if one.rewrite == KIND]
    assert left == ["it has dropout"] and not replaced(backend.found, KIND)


def test_repeated_keys_of_one_projection_are_shared_first(by_definition):
    """Both rewrites in a row: one of heads and mask, then one of the gradient."""
    B, T, H, G, D = 2, 12, 4, 2, 8

    def attend(x):
        q, k, v = x.split([H * D, G * D, G * D], -1)
        q = q.view(B, T, H, D).transpose(1, 2)
        k, v = (p.view(B, T, G, D).transpose(1, 2) for p in (k, v))
        k, v = (p[:, :, None].expand(B, G, 2, T, D).reshape(B, H, T, D) for p in (k, v))
        mask = torch.ones(T, T, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).square().sum()

    torch._dynamo.reset()
    x = torch.randn(B, T, (H + 2 * G) * D, generator=torch.Generator().manual_seed(0))
    x.requires_grad_()
    backend = SubstitutingBackend(["attention", KIND]).before("aot_eager")
    (plain,) = torch.autograd.grad(attend(x), x)
    (ours,) = torch.autograd.grad(torch.compile(attend, backend=backend)(x), x)
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    assert [one.rewrite for one in backend.found] == ["attention", KIND]
    assert all(one.what for one in backend.found)


def test_a_kernel_refuses_a_cpu():
    if torch.cuda.is_available():
        pytest.skip("runs natively here")
    torch._dynamo.reset()
    backend = SubstitutingBackend([KIND]).before("eager")
    torch.compile(language_loss, backend=backend)(LanguageModel(), language_batch())
    assert backend.found and all("'triton_flash' needs" in one.reason for one in backend.found)


@pytest.mark.parametrize(
    ("shape", "dtype", "capability", "said"),
    [
        (NANOGPT, torch.bfloat16, (9, 0), ""),
        (NANOGPT, torch.float16, (9, 0), ""),
        ((1, 4, 2048, 64), torch.bfloat16, (9, 0), ""),
        ((1, 4, 1, 32), torch.bfloat16, (9, 0), ""),
        (NANOGPT, torch.float32, (9, 0), "not in torch.float32"),
        ((16, 12, 1024, 128), torch.bfloat16, (9, 0), "wider than 64"),
        ((16, 12, 1024, 80), torch.bfloat16, (9, 0), "wider than 64"),
        ((4, 32, 4096, 64), torch.bfloat16, (9, 0), "more than 2,048 tokens"),
        ((4, 32, 2049, 64), torch.bfloat16, (9, 0), "more than 2,048 tokens"),
        (NANOGPT, torch.bfloat16, (8, 0), "compute capability 9.0"),
        (NANOGPT, torch.bfloat16, (10, 0), "compute capability 9.0"),
    ],
)
def test_it_is_taken_where_it_pays(shape, dtype, capability, said):
    reason = does_not_pay(shape, dtype, capability)
    assert said in reason and bool(said) == bool(reason)


@pytest.mark.parametrize(
    ("tokens", "width", "dtype", "said"),
    [
        (16, 16, torch.float32, "in bf16 and fp16 only"),
        (16, 128, torch.bfloat16, "wider than 64"),
        (4096, 8, torch.bfloat16, "more than 2,048 tokens"),
    ],
)
def test_the_reason_is_told_where_it_does_not_pay(tokens, width, dtype, said, monkeypatch):
    """On a card that a CPU plays."""
    monkeypatch.setattr(packed_attention, "refusal", lambda *inputs: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    torch._dynamo.reset()
    backend = SubstitutingBackend([KIND]).before("eager")
    x = torch.randn(1, tokens, 3 * width, dtype=dtype, requires_grad=True)

    @torch.compile(backend=backend)
    def attend(x):
        parts = x.split(width, -1)
        q, k, v = (p.view(1, tokens, 1, width).transpose(1, 2) for p in parts)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    attend(x)
    (one,) = backend.found
    assert said in one.reason and not one.what


def test_autocast_casts_what_holds_all_three(by_definition, monkeypatch):
    """From fp32 to the dtype of attention, and its gradient back; by the math of torch's bf16."""
    monkeypatch.setattr(packed_attention, "REWRITE", PackedAttention("math"))
    monkeypatch.setattr(packed_attention, "refusal", lambda *inputs: "")
    monkeypatch.setattr(packed_attention, "does_not_pay", lambda *inputs: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    torch._dynamo.reset()

    def attend(x):
        with torch.autocast("cpu", torch.bfloat16):
            q, k, v = (p.view(2, 12, 2, 8).transpose(1, 2) for p in x.split(16, -1))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    x = torch.randn(2, 12, 48, generator=torch.Generator().manual_seed(0), requires_grad=True)
    backend = SubstitutingBackend([KIND]).before("aot_eager")
    results = []
    for call in (attend, torch.compile(attend, backend=backend)):
        out = call(x)
        (gradient,) = torch.autograd.grad(out.float().square().sum(), x)
        assert out.dtype == torch.bfloat16 and gradient.dtype == torch.float32
        results.append(gradient)
    torch.testing.assert_close(*results, rtol=3e-2, atol=3e-2)
    assert [one.what for one in backend.found] == ["packed_attention math"], backend.found


def test_all_takes_it_and_its_calls_are_counted():
    assert KIND in kinds_of_all()
    place = "model.py:1 (f)"
    planned = [
        Substitution("attention", place, "is_causal", "fp64 0", count=2),
        Substitution(KIND, place, "packed_attention triton_flash", "fp64 0", count=2),
    ]
    run = replace(run_of(), substitutions=tuple(planned))
    mismatch = technique("substitute").mismatch

    def said(calls, others=0):
        ops = {"steplab::packed_attention": calls, "steplab::packed_attention_backward": 2}
        aten = {"aten::_scaled_dot_product_cudnn_attention": others} if others else {}
        return mismatch({"kinds": "all"}, replace(run, ran=Ran(own_ops=ops, attention_ops=aten)))

    assert said(2) == said(2, 1) == ""
    assert said(1) == "substitute replaced packed_attention in 2 places, but 1 ran in a step"


@pytest.mark.slow
def test_through_inductor(by_definition):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, batch = LanguageModel(layers=1), language_batch()
    plain = gradients(model, language_loss, batch)
    backend = SubstitutingBackend([KIND])
    ours = gradients(model, torch.compile(language_loss, backend=backend, fullgraph=True), batch)
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)
    assert replaced(backend.found, KIND) == 1
