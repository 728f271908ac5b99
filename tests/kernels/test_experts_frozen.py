"""What expert layers leave out: gradients that nobody needs, and layers without a token."""

import pytest
import torch

from steplab.core.errors import Unsupported
from steplab.kernels import experts as experts_op
from steplab.kernels import feed_forward as feed_forward_op
from tests.kernels.expert_cases import Case, Products, make, results

WANTED = [(0,), (1,), (2,), (3,), (0, 1), (0, 3), (2, 3)]


def some_gradients(function, inputs, wanted, d_out):
    """Return the gradients of the inputs `wanted` by number; the others are frozen."""
    leaves = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(inputs)]
    return torch.autograd.grad(function(*leaves), [leaves[i] for i in wanted], d_out)


@pytest.mark.parametrize("wanted", WANTED, ids=str)
def test_what_is_frozen_changes_no_other_gradient(wanted):
    inputs, experts_TK, d_out = make(Case())

    def layer(x, weights, w_in, w_out):
        bundle = experts_op.ExpertWeights(w_in, w_out, "gelu")
        return experts_op.experts("fused", x, weights, experts_TK, bundle, Products())[0]

    def network(x, weights, w_in, w_out):
        return feed_forward_op.feed_forward("fused", x, w_in[0], w_out[0], "gelu", weights[:, :1])

    for function in (layer, network):
        everything = some_gradients(function, inputs, range(4), d_out)
        found = some_gradients(function, inputs, wanted, d_out)
        assert all(torch.equal(g, everything[i]) for g, i in zip(found, wanted, strict=True))


def test_gradients_of_frozen_matrices_are_not_computed(monkeypatch):
    from steplab.kernels.experts import fused

    (x, weights, w_in, w_out), experts_TK, d_out = make(Case())
    monkeypatch.setattr(fused, "weight_gradient", None)  # whoever calls it fails
    bundle = experts_op.ExpertWeights(w_in, w_out, "gelu")
    out, _ = experts_op.experts(
        "fused", x.requires_grad_(), weights, experts_TK, bundle, Products()
    )
    out.backward(d_out)
    assert x.grad.abs().sum() > 0
    z = x.detach() @ w_in[0].T
    operands = (d_out, x.detach(), w_in[0], w_out[0], None, z, None, "gelu")
    ops = torch.ops.steplab
    for needs in ((True, False, False), (False, True, False), (False, False, True)):
        found = ops.fused_feed_forward_backward(*operands, *needs)
        assert [bool(g.numel()) for g in found] == list(needs)


@pytest.mark.parametrize("impl", ["loop", "grouped", "fused"])
def test_without_a_token_nothing_comes_out_and_no_matrix_has_a_gradient(impl):
    case = Case("balanced", tokens=0)
    out, dx, dweights, *matrices = results(impl, case, *make(case))
    assert out.shape == dx.shape == (0, 16) and dweights.shape == (0, 2)
    assert not any(gradient.any() for gradient in matrices)


def test_a_capacity_needs_a_token():
    (x, _, w_in, w_out), _, _ = make(Case("balanced", tokens=0))
    with pytest.raises(Unsupported, match="experts 'capacity' needs at least one token"):
        experts_op.choose("capacity", x, experts_op.ExpertWeights(w_in, w_out, "gelu"))
