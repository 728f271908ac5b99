"""The routing forms against each other, losses and gradients in fp64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steplab.kernels.stream_norm import gather_rows, scatter_rows
from steplab.workloads.hydra.routing import Depth, DepthRouter, choose_rows
from tests.workloads.hydra.models import SMALL, gradients, make, tokens

FREE = {"aux_factor": 0.0, "ponder_factor": 0.0, "advantage_factor": 0.0}


def assert_same(one, other):
    """Compare the logits and all gradients of two models that have the same weights."""
    torch.testing.assert_close(one(tokens()), other(tokens()), rtol=1e-10, atol=1e-10)
    first, second = gradients(one), gradients(other)
    for name in first.keys() & second.keys():
        torch.testing.assert_close(first[name], second[name], rtol=1e-8, atol=1e-9, msg=name)


def test_top_k_of_all_tokens_is_dense():
    dense = make(mod="dense", **FREE)
    assert_same(dense, make(mod="top-k", capacity=1.0, mod_gate="one", **FREE))


def test_top_k_of_all_tokens_weighted_is_soft():
    assert_same(make(mod="soft", **FREE), make(mod="top-k", capacity=1.0, **FREE))


def test_top_k_equals_its_threshold():
    """Between the k-th and the next score of every sequence there is room for a threshold."""
    top_k = make(mod="top-k", mor="fixed", blocks=3, recursions=1, **FREE)
    threshold = make(mod="threshold", mor="fixed", blocks=3, recursions=1, **FREE)
    scores = []
    routed = top_k.blocks[1].recursion.feed_forward
    routed.register_forward_hook(lambda *_: scores.append(_[2][2].probability_BS.logit()))
    one = tokens(batch=1)
    expected = top_k(one)
    falling = scores[0].sort(descending=True).values[0]
    threshold.thresholds.mod_NR[1] = falling[11:13].mean()
    torch.testing.assert_close(threshold(one), expected, rtol=1e-10, atol=1e-10)


def test_packed_is_masked():
    assert_same(make(mod="soft", mor="masked", **FREE), make(mod="soft", mor="packed", **FREE))


def test_capacity_is_masked_with_depths_by_rank(monkeypatch):
    capacity = make(mod="dense", mor="capacity", **FREE)
    masked = make(mod="dense", mor="masked", **FREE)
    by_rank = DepthRouter.forward

    def forward(self, h_BSD, least_R=None):
        self.form = "capacity"
        found = by_rank(self, h_BSD)
        self.form = "masked"
        return found

    expected, by_capacity = capacity(tokens()), gradients(capacity)
    monkeypatch.setattr(DepthRouter, "forward", forward)
    torch.testing.assert_close(masked(tokens()), expected, rtol=1e-10, atol=1e-10)
    for name, gradient in gradients(masked).items():
        torch.testing.assert_close(gradient, by_capacity[name], rtol=1e-8, atol=1e-9, msg=name)


def test_capacity_takes_ever_fewer_tokens():
    depths = make(mod="dense", mor="capacity").blocks[0].recursion.router(torch.randn(2, 24, 64))
    counts = [(depths.depth_BS >= i).sum(1).tolist() for i in range(3)]
    assert counts == [[24, 24], [16, 16], [8, 8]]
    deep = depths.depth_BS == 2
    assert depths.logit_BS[deep].min() > depths.logit_BS[~deep].min()
    assert all(depths.depth_BS[range(2), depths.logit_BS.argmax(1)] == 2)


def test_masked_at_the_greatest_depth_is_fixed(monkeypatch):
    fixed, masked = make(mod="dense", mor="fixed", **FREE), make(mod="dense", mor="masked", **FREE)
    monkeypatch.setattr(torch.Tensor, "round", lambda x: torch.full_like(x, 2.0))
    # Its value is 1 anyway; its gradient is the router's, which `fixed` does not ask.
    monkeypatch.setattr(Depth, "straight_through", lambda self: torch.ones_like(self.depth_BS))
    assert_same(fixed, masked)


def test_soft_with_all_weight_on_the_last_pass_is_fixed(monkeypatch):
    def last(self, passes):
        weight_RBS = self.wanted_BS.new_zeros(passes, *self.wanted_BS.shape)
        weight_RBS[-1] = 1
        return weight_RBS

    monkeypatch.setattr(Depth, "pass_weights", last)
    assert_same(make(mod="dense", mor="fixed", **FREE), make(mod="dense", mor="soft", **FREE))


def test_a_least_depth_is_kept():
    model = make(mod="dense", mor="masked", min_depth=1)
    depth = model.blocks[0].recursion.router(torch.randn(2, 24, 64, dtype=torch.float64)).depth_BS
    assert depth.min() >= 1 and depth.max() <= 2
    assert SMALL.pass_sizes(24) == (24, 16, 8)


def test_a_least_depth_is_kept_by_thresholds():
    """In training everyone makes the second pass, whatever the running mean of the lowest is."""
    router = make(mod="dense", mor="threshold", min_depth=1).blocks[0].recursion.router
    h_BSD = torch.randn(2, 24, 64, dtype=torch.float64)
    depth = router(h_BSD, torch.full((3,), 10.0)).depth_BS
    assert depth.min() == depth.max() == 1


@pytest.mark.parametrize("gate", ["router", "one"])
def test_top_k_of_all_tokens_leaves_none_out_when_generating(gate):
    model = make(mod="top-k", mor="fixed", capacity=1.0, mod_gate=gate).eval()
    expected = model(tokens())
    model.become_causal()
    torch.testing.assert_close(model(tokens()), expected, rtol=1e-10, atol=1e-10)


@settings(max_examples=25)
@given(st.integers(1, 3), st.integers(1, 9), st.integers(0, 99), st.data())
def test_rows_come_back_where_they_were(batch, length, seed, data):
    taken = data.draw(st.integers(1, length))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, length, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    choice = choose_rows(torch.rand(batch, length, generator=generator).topk(taken).indices, length)
    rows = gather_rows(x, choice)
    index = choice.rows_BK[..., None].expand(-1, -1, 3)
    assert torch.equal(rows, x.gather(1, index))
    assert torch.equal(scatter_rows(rows, choice), torch.zeros_like(x).scatter(1, index, rows))
    assert torch.autograd.gradcheck(lambda t: gather_rows(t, choice), (x,))
    assert torch.autograd.gradcheck(
        lambda t: scatter_rows(t, choice), (rows.detach().requires_grad_(),)
    )


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_the_loss_does_not_depend_on_its_implementation(impl):
    model = make(torch.float32, mor="masked")
    truth = gradients(make(mor="masked"))
    model.loss.impl = impl
    found = gradients(model)
    assert model.loss.ran == impl
    for name in truth:
        error = (found[name].double() - truth[name]).norm() / truth[name].norm().clamp_min(1e-3)
        assert error < 1e-3, name
