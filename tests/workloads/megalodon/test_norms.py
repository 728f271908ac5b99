"""The timestep norm against its definition; norms that keep their precision."""

import pytest
import torch

from steplab.kernels.timestep_norm import Statistics
from steplab.workloads.megalodon.layers import (
    TimestepNorm,
    ZeroCenteredLayerNorm,
    ZeroCenteredRMSNorm,
)

WIDTH, GROUPS, EPS = 12, 3, 1e-5


def by_definition(x, groups, eps=EPS):
    """Mean and population variance of all features of a group over all tokens so far, in fp64."""
    B, L, D = x.shape
    parts = x.double().view(B, L, groups, -1)
    out = torch.empty_like(parts)
    for t in range(L):
        seen = parts[:, : t + 1].transpose(1, 2).flatten(2)
        mean, variance = seen.mean(-1), seen.var(-1, correction=0)
        out[:, t] = (parts[:, t] - mean[..., None]) / (variance[..., None] + eps).sqrt()
    return out.view(B, L, D)


def make_norm():
    return TimestepNorm(WIDTH, GROUPS, EPS)


def test_it_equals_the_definition():
    x = 2 * torch.randn(2, 30, WIDTH) + torch.randn(WIDTH)
    torch.testing.assert_close(
        make_norm()(x)[0].double(), by_definition(x, GROUPS), rtol=1e-5, atol=1e-5
    )


def test_gradients_equal_those_of_the_definition():
    x = torch.randn(1, 9, WIDTH, dtype=torch.float64, requires_grad=True)
    norm = make_norm().double()
    torch.autograd.gradcheck(lambda x: norm(x)[0], x)
    weights = torch.randn_like(x)
    (found,) = torch.autograd.grad((norm(x)[0] * weights).sum(), x)
    (expected,) = torch.autograd.grad((by_definition_of(x) * weights).sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def by_definition_of(x):
    parts = x.view(*x.shape[:2], GROUPS, -1)
    out = []
    for t in range(x.shape[1]):
        seen = parts[:, : t + 1].transpose(1, 2).flatten(2)
        mean, variance = seen.mean(-1), seen.var(-1, correction=0)
        out.append((parts[:, t] - mean[..., None]) / (variance[..., None] + EPS).sqrt())
    return torch.stack(out, 1).flatten(2)


@pytest.mark.parametrize("pieces", [(20,), (1,) * 20, (7, 1, 12), (19, 1)])
def test_pieces_equal_the_whole(pieces):
    x = torch.randn(2, 20, WIDTH) + 3
    norm = make_norm()
    whole, end = norm(x, keeps=True)
    out, state, at = [], None, 0
    for size in pieces:
        y, state = norm(x[:, at : at + size], state, keeps=True)
        out.append(y)
        at += size
    torch.testing.assert_close(torch.cat(out, 1), whole, rtol=1e-5, atol=1e-5)
    assert torch.equal(state.count_B, end.count_B) and state.count_B.tolist() == [20, 20]
    torch.testing.assert_close(state.mean_BG, end.mean_BG)
    torch.testing.assert_close(state.variance_BG, end.variance_BG)


def test_masked_tokens_are_as_if_they_were_not_there():
    x = torch.randn(2, 12, WIDTH)
    valid = torch.ones(2, 12, dtype=torch.bool)
    valid[0, [0, 3, 4]] = False
    spoiled = x.clone()
    spoiled[0, [0, 3, 4]] = 1e6
    norm = make_norm()
    with torch.no_grad():
        norm.bias.fill_(0.5)
    y, state = norm(spoiled, None, valid, True)
    alone, own = norm(x[:1, valid[0]], None, None, True)
    torch.testing.assert_close(y[:1, valid[0]], alone, rtol=1e-4, atol=1e-4)
    assert torch.equal(y[0, [0, 3, 4]], torch.zeros(3, WIDTH))
    assert state.count_B.tolist() == [9, 12]
    torch.testing.assert_close(state.variance_BG[:1], own.variance_BG, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("places", [[0, 3, 4], [11], list(range(12))])
def test_garbage_that_is_masked_reaches_nothing(garbage, places):
    """Outputs, statistics and all gradients are those of zeros in its place, to the bit."""
    norm, x = make_norm(), torch.randn(2, 12, WIDTH)
    valid = torch.ones(2, 12, dtype=torch.bool)
    valid[0, places] = False

    def everything(stand_in):
        filled = x.clone()
        filled[0, places] = stand_in
        before = Statistics(torch.tensor([0, 5]), torch.zeros(2, GROUPS), torch.ones(2, GROUPS))
        leaves = [filled.requires_grad_(), norm.weight, norm.bias]
        y, last = norm(filled, before, valid, True)
        out = y.square().sum() + last.mean_BG.sum() + last.variance_BG.sum()
        return [y, *last, *torch.autograd.grad(out, leaves)]

    found = everything(garbage)
    assert all(torch.equal(a, b) for a, b in zip(found, everything(0.0), strict=True))
    assert not found[4][0, places].any()


def test_a_row_without_a_token_keeps_its_statistics():
    x = torch.randn(1, 5, WIDTH, requires_grad=True)
    none = torch.zeros(1, 5, dtype=torch.bool)
    y, state = make_norm()(x, None, none, True)
    fresh = Statistics.fresh(1, GROUPS, x)
    assert all(torch.equal(a, b) for a, b in zip(state, fresh, strict=True))
    y.sum().backward()
    assert not y.any() and torch.isfinite(x.grad).all()
    empty, same = make_norm()(x[:, :0], fresh, keeps=True)
    assert empty.shape == (1, 0, WIDTH) and same is fresh


def test_a_large_offset_and_many_tokens():
    """The sums are in fp64: neither an offset of 1e4 nor 100,000 tokens disturb the variance."""
    torch.manual_seed(0)
    x = torch.randn(1, 400, WIDTH) + 1e4
    y = make_norm()(x)[0]
    # What fp32 leaves of the digits behind an offset of 1e4: 5e-4 of a deviation.
    torch.testing.assert_close(y.double(), by_definition(x, GROUPS), rtol=0, atol=2e-3)
    long = torch.randn(1, 100_000, WIDTH)
    with torch.no_grad():
        y, state = make_norm()(long, keeps=True)
    assert abs(float(y[:, -2000:].std()) - 1) < 0.01
    parts = long.double().view(1, -1, GROUPS, WIDTH // GROUPS).transpose(1, 2).flatten(2)
    torch.testing.assert_close(state.mean_BG.double(), parts.mean(-1), rtol=1e-5, atol=1e-6)
    expected = parts.var(-1, correction=0)
    torch.testing.assert_close(state.variance_BG.double(), expected, rtol=1e-5, atol=1e-6)


def test_scales_are_stored_minus_one():
    x = torch.randn(2, 5, WIDTH)
    expected = torch.nn.functional.layer_norm(x, (WIDTH,), eps=EPS)
    torch.testing.assert_close(ZeroCenteredLayerNorm(WIDTH, EPS)(x), expected)
    norm = ZeroCenteredRMSNorm(WIDTH, EPS)
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (WIDTH,), eps=EPS))
    assert not norm.weight.any()


def test_norms_stay_in_fp32_when_a_model_is_cast():
    for norm in (make_norm(), ZeroCenteredRMSNorm(WIDTH, EPS), ZeroCenteredLayerNorm(WIDTH, EPS)):
        with torch.no_grad():
            norm.weight.fill_(1 / 3)
        kept = norm.weight.clone()
        norm.to(torch.bfloat16)
        assert norm.weight.dtype == torch.float32 and torch.equal(norm.weight, kept)
        assert norm.double().weight.dtype == torch.float64


def test_outputs_come_in_the_dtype_of_the_next_product():
    x = torch.randn(1, 4, WIDTH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for norm in (ZeroCenteredRMSNorm(WIDTH, EPS), ZeroCenteredLayerNorm(WIDTH, EPS)):
            assert norm(x).dtype == torch.bfloat16
        y, state = make_norm()(x, keeps=True)
    assert y.dtype == torch.bfloat16 and state.mean_BG.dtype == torch.float32
