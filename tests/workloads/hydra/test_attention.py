"""CCGQA against its definition, written token by token and head by head."""

import pytest
import torch
import torch.nn.functional as F

from steplab.testing.tolerance import assert_as_good_as
from steplab.workloads.hydra.attention import (
    DenseConvolution,
    DepthwiseConvolution,
    HeadConvolution,
)
from tests.workloads.hydra.models import make

HEADS, GROUPS, HEAD, LATENT, KV = 4, 2, 4, 16, 8


def conv1d(x_BSC, weight, groups):
    """torch's own convolution of the same weights, channels before time."""
    return F.conv1d(F.pad(x_BSC.mT, (2, 0)), weight, groups=groups).mT


def filled(module):
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module.double()


@pytest.mark.parametrize("length", [1, 2, 3, 11])
def test_convolutions_equal_torchs(length):
    x = torch.randn(2, length, LATENT + KV, dtype=torch.float64)
    within = filled(HeadConvolution(HEADS + GROUPS, HEAD))
    kernel = within.weight_HEKE.transpose(2, 3).flatten(0, 1)
    torch.testing.assert_close(within(x), conv1d(x, kernel, HEADS + GROUPS))
    single = filled(DepthwiseConvolution(LATENT + KV))
    torch.testing.assert_close(single(x), conv1d(x, single.weight_KC.T[:, None], LATENT + KV))
    dense = filled(DenseConvolution(LATENT, KV))
    q, k = x.split([LATENT, KV], -1)
    parts = (conv1d(q, dense.query_QKQ.mT, 1), conv1d(k, dense.key_CKC.mT, 1))
    torch.testing.assert_close(dense(x), torch.cat(parts, -1))


def by_definition(layer, x_BSD, paper):
    """Return CCGQA of (1, S, D), one token and one head at a time."""
    z = layer.qkv(x_BSD)[0]
    q0, k0 = (
        z[:, :LATENT].unflatten(-1, (HEADS, HEAD)),
        z[:, LATENT:][:, :KV].unflatten(-1, (2, HEAD)),
    )
    convolved = layer.convolutions(z[None, :, : LATENT + KV])[0]
    q1 = convolved[:, :LATENT].unflatten(-1, (HEADS, HEAD))
    k1 = convolved[:, LATENT:].unflatten(-1, (GROUPS, HEAD))
    late = 4 if not paper else HEAD  # half of the 8 channels; one of the two heads
    now, before = z[:, LATENT + KV :].split([KV - late, late], -1)
    v = torch.cat([now, torch.cat([torch.zeros_like(before[:1]), before[:-1]])], -1)
    v = v.unflatten(-1, (GROUPS, HEAD))
    out = torch.empty(len(z), HEADS, HEAD, dtype=x_BSD.dtype)
    for h in range(HEADS):
        g = h // (HEADS // GROUPS)
        own = range(g * 2, g * 2 + 2)
        if paper:
            q = q1[:, h] + (q0[:, h] + k0[:, g]) / 2
            k = k1[:, g] + sum((q0[:, i] + k0[:, g]) / 2 for i in own) / 2
            q = q / q.norm(dim=-1, keepdim=True) * HEAD**0.5
            k = k / k.norm(dim=-1, keepdim=True) * HEAD**0.5 * layer.temperature[g].exp()
        else:
            q = q1[:, h] + 0.5 * k0.mean(1)
            k = k1[:, g] + 0.5 * q0.mean(1)
            q = q / q.norm(dim=-1, keepdim=True)
            k = k / k.norm(dim=-1, keepdim=True) * layer.temperature
        q, k = (layer.rotary(t[None, None])[0, 0] for t in (q, k))
        for t in range(len(z)):
            weights = (q[t] @ k[: t + 1].T / HEAD**0.5).softmax(-1)
            out[t, h] = weights @ v[: t + 1, g]
    return layer.out(out.flatten(1))[None]


@pytest.mark.parametrize("attention", ["hydra", "paper"])
def test_attention_equals_its_definition(attention):
    layer = make(attention=attention).blocks[1].attention
    torch.manual_seed(3)
    x = torch.randn(1, 13, 64, dtype=torch.float64)
    expected = by_definition(layer, x, attention == "paper")
    torch.testing.assert_close(layer(x), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("attention", ["hydra", "paper"])
def test_autocast_rounds_no_more_than_its_products_do(attention):
    """bf16 against fp64, beside the same layer whose weights and input were rounded to bf16."""
    truth_layer = make(attention=attention).blocks[1].attention
    layer = make(torch.float32, attention=attention).blocks[1].attention
    peer = make(torch.float32, attention=attention).blocks[1].attention.bfloat16()
    torch.manual_seed(3)
    x = torch.randn(2, 13, 64)
    truth = truth_layer(x.double())
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x)
    assert found.dtype == torch.bfloat16
    assert_as_good_as(found.detach(), peer(x.bfloat16()).detach(), truth.detach())


def test_half_of_the_values_come_from_the_token_before():
    """A token's own late channels are seen by the next token first."""
    layer = make(attention="paper").blocks[1].attention
    x = torch.randn(1, 5, 64, dtype=torch.float64)
    with torch.no_grad():
        layer.qkv.weight[-HEAD:] = 0
    plain = layer(x)
    with torch.no_grad():
        layer.qkv.weight[-HEAD:] = 1
    late = layer(x)
    torch.testing.assert_close(late[:, 0], plain[:, 0], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(late[:, 1], plain[:, 1])
