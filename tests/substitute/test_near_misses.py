"""What looks like a known form is replaced where it is one, else left alone: never wrong."""

import pytest
import torch

from steplab.substitute.backend import SubstitutingBackend
from steplab.substitute.feed_forward import FusedFeedForward
from steplab.substitute.norm import FusedNorm
from steplab.substitute.packed_attention import PackedAttention
from tests.substitute.near_misses import (
    ALONE,
    FEED_FORWARDS,
    LOSSES,
    MASKS,
    NORMS,
    PACKED,
    ROTATIONS,
    SAME,
    B,
    C,
    D,
    H,
    S,
    T,
    V,
    attend,
)

# By the definition, which a CPU can run.
BY_DEFINITION = {
    "feed_forward": FusedFeedForward("reference"),
    "norm": FusedNorm("reference"),
    "packed_attention": PackedAttention("reference"),
}


def traced(function, inputs, kind):
    """Return what the function computes with and without substitutions, and what was replaced."""
    torch._dynamo.reset()
    backend = SubstitutingBackend([kind]).before("eager")
    backend.rewrites = {kind: BY_DEFINITION.get(kind, backend.rewrites[kind])}
    compiled = torch.compile(function, backend=backend)
    found = []
    for call in (function, compiled):
        leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
        value = call(*leaves)
        along = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).view_as(value)
        value.backward(along)
        found.append([value.detach(), *(t.grad for t in leaves if t.requires_grad)])
    return *found, backend.found


def check(function, expected, inputs, kind, exact=1e-9):
    plain, ours, seen = traced(function, inputs, kind)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=exact, atol=exact)
    replaced = [one for one in seen if one.what]
    assert all(one.proof and not one.reason for one in replaced)
    assert all(one.reason for one in seen if not one.what)
    if expected == SAME:
        assert replaced and len(replaced) == len(seen), seen
    elif expected == ALONE:
        assert not replaced, seen


def normal(*shape):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64
    )


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name):
    targets = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(0))
    targets[0, :2] = 3
    exact = 1e-6 if name == "in fp32" else 1e-9
    check(*LOSSES[name], (normal(B, T, D), normal(V, D), targets), "loss", exact)


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    q, k, v = normal(B, H, S, D), normal(B, H, S, D) + 0.1, normal(B, H, S, D) - 0.2
    check(*MASKS[name], (q, k, v), "attention")


@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.float32).min])
def test_a_mask_of_an_fp32_model(hidden):
    def causal(q, k, v):
        return attend(q, k, v, torch.full((S, S), hidden).triu(1))

    inputs = [normal(B, H, S, D).float() + offset for offset in (0, 0.1, -0.2)]
    check(causal, SAME, inputs, "attention", 1e-5)


@pytest.mark.parametrize("name", NORMS)
def test_norms(name):
    x, w, r = normal(B, T, D), 1 + 0.3 * normal(D), 0.5 * normal(B, T, D).flip(0)
    check(*NORMS[name], (x, w, r), "norm")


@pytest.mark.parametrize("name", FEED_FORWARDS)
def test_feed_forwards(name):
    inner = 3 * D
    x, w, v, r = normal(B, T, D), normal(inner, D) / 4, normal(D, inner).flip(0) / 6, normal(inner)
    check(*FEED_FORWARDS[name], (x, w, v, r), "feed_forward")


@pytest.mark.parametrize("name", ROTATIONS)
def test_rotations(name):
    q, k = normal(B, H, S, D), normal(B, H, S, D) + 0.1
    check(*ROTATIONS[name], (q, k, normal(D // 2).abs()), "rotary")


@pytest.mark.parametrize("name", PACKED)
def test_packed_attention(name, monkeypatch):
    monkeypatch.setattr("steplab.substitute.packed_attention.SMALL_TIME", 6)  # shorter than S
    check(*PACKED[name], (normal(B, S, 3 * C), normal(B, S, 3 * C).flip(1)), "packed_attention")
