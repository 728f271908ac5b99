"""Head and loss of a step that is not compiled: in chunks where proved, else as they are."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import steplab
from steplab.core.errors import Unsupported
from steplab.substitute import lazy_logits
from steplab.substitute.backend import SubstitutingBackend
from steplab.substitute.lazy_logits import LazyHeads, LazyLogits
from tests.substitute.models import LanguageModel, language_batch, language_loss
from tests.substitute.near_misses import ALONE, LOSSES, SAME, B, D, T, V
from tests.substitute.strangers import losses
from tests.substitute.strangers.case import VOCAB
from tests.substitute.test_strangers import step


def both_ways(function, dtype=torch.float64):
    """Return what a function computes op by op and with lazy logits, and what was replaced."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*s, generator=generator, dtype=dtype) for s in ((B, T, D), (V, D)))
    y = torch.randint(0, V, (B, T), generator=generator)
    y[0, :2] = 3
    backend, found = SubstitutingBackend(["loss"]), []
    heads = LazyHeads(backend)
    for is_lazy in (False, True, True):  # what was proved is used again
        leaf, weight = x.clone().requires_grad_(), nn.Parameter(w.clone())
        if is_lazy:
            with heads:
                value = function(leaf, weight, y)
        else:
            value = function(leaf, weight, y)
        along = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).view_as(value)
        value.backward(along)
        assert type(value) is torch.Tensor
        found.append([value.detach(), leaf.grad, weight.grad])
    return found, backend.found


@pytest.fixture(autouse=True)
def narrow_heads(monkeypatch):
    monkeypatch.setattr(lazy_logits, "AMPLIFIED", 2)


@pytest.mark.parametrize("name", LOSSES)
def test_near_misses_are_left_alone_or_right(name):
    function, expected = LOSSES[name]
    (plain, *lazy), seen = both_ways(function)
    exact = 1e-6 if name == "in fp32" else 1e-9
    for results in lazy:
        for ours, theirs in zip(results, plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=exact, atol=exact)
    replaced = [one for one in seen if one.what]
    assert all(one.proof for one in replaced)
    if expected == ALONE:
        assert not replaced, seen
    if expected == SAME:
        assert replaced, seen


@pytest.mark.parametrize("case", losses.CASES, ids=lambda case: case.name)
def test_steps_of_a_strangers_models_are_theirs(case, monkeypatch):
    monkeypatch.setattr(lazy_logits, "AMPLIFIED", 1)
    torch.manual_seed(0)
    plain = case.model().double()
    ours = copy.deepcopy(plain)
    backend = SubstitutingBackend(["loss"])
    heads = LazyHeads(backend)

    def lazily(model, batch):
        with heads:
            return case.loss(model, batch)

    generator = torch.Generator().manual_seed(1)
    for shape in case.shapes:
        batch = tuple(torch.randint(VOCAB, shape, generator=generator) for _ in range(2))
        expected, found = step(case.loss, plain, batch), step(lazily, ours, batch)
        for name, truth in expected.items():
            error = (found[name].double() - truth.double()).norm()
            assert error <= case.exact * truth.double().norm().clamp_min(1e-6), (
                name,
                backend.found,
            )
    assert all(one.reason for one in backend.found if not one.what)


def test_of_a_layer_whose_output_is_looked_at_nothing_is_put_off_again():
    backend = SubstitutingBackend(["loss"])
    heads, weight = LazyHeads(backend), nn.Parameter(torch.randn(V, D))
    with heads:
        first = F.linear(torch.randn(2, D), weight)
        assert isinstance(first, LazyLogits) and first.shape == (2, V)
        assert type(first.view(-1).float()[:3]) is LazyLogits
        assert type(first.exp()) is torch.Tensor
        assert type(F.linear(torch.randn(2, D), weight)) is torch.Tensor
    assert not backend.found


class OwnLoss(torch.autograd.Function):
    """A loss that torch's functions do not see."""

    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits)
        return logits.square().sum()

    @staticmethod
    def backward(ctx, d_loss):
        return 2 * d_loss * ctx.saved_tensors[0]


def views_changed_in_place(x, w, y):
    logits = F.linear(x, w)
    flat = logits.view(-1, V)
    flat[:, 0] = 0.0
    return F.cross_entropy(logits.view(-1, V), y.view(-1))


def by_a_property(x, w, y):
    return F.cross_entropy(F.linear(x, w).view(-1, V).T.T, y.view(-1))


def unseen(logits):
    with torch._C.DisableTorchFunctionSubclass():
        return logits.exp().sum()


OTHER_USES = {
    "an autograd function": lambda x, w, y: OwnLoss.apply(F.linear(x, w)[:, 1:]),
    "of both": lambda x, w, y: (
        OwnLoss.apply(logits := F.linear(x, w)) + F.cross_entropy(logits.mT, y)
    ),
    "a view in place": views_changed_in_place,
    "a property": by_a_property,
    "as a second argument": lambda x, w, y: F.mse_loss(torch.zeros(B, T, V).to(x), F.linear(x, w)),
    "in a list": lambda x, w, y: torch.cat([F.linear(x, w), F.linear(x, w)], 1).sum(),
    "without torch's functions": lambda x, w, y: unseen(F.linear(x, w)) + w.sum(),
    "as data": lambda x, w, y: F.linear(x, w).detach().sum() + F.linear(x, w).data.sum() + w.sum(),
}


@pytest.mark.parametrize("name", OTHER_USES)
def test_every_other_use_is_right(name):
    (plain, *lazy), seen = both_ways(OTHER_USES[name])
    for results in lazy:
        for ours, theirs in zip(results, plain, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    assert not [one for one in seen if one.what]


def test_logits_that_would_not_be_what_they_were_are_refused():
    heads, x = LazyHeads(SubstitutingBackend(["loss"])), torch.randn(2, D)
    with heads:
        kept = F.linear(x, nn.Parameter(torch.randn(V, D)))
    with pytest.raises(Unsupported, match=r"looked at after the loss was returned\. Look at them"):
        kept.argmax(-1)
    with heads:
        kept = F.linear(x, nn.Parameter(torch.randn(V, D)))
        x.numpy()[:] = 1  # behind torch's back
        x._version or torch._C._autograd._unsafe_set_version_counter((x,), (9,))
        with pytest.raises(Unsupported, match="after a change in place"):
            kept.sum()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-weights"])
def test_a_step_that_is_not_compiled_has_its_loss_in_chunks(precision):
    batch, models, curves = language_batch(4, 16), [], []
    for words in ("", ",substitute=loss"):
        torch.manual_seed(0)
        models.append(LanguageModel())
        recipe = f"precision={precision},optimizer=one-pass{words}"
        tuned = steplab.optimize(models[-1], language_loss, recipe)
        curves.append([float(tuned([batch]).loss) for _ in range(4)])
    rounding = 1e-5 if precision == "fp32" else 2e-2
    assert curves[1] == pytest.approx(curves[0], rel=rounding) and curves[1][3] < curves[1][0]
    assert list(models[1].state_dict()) == list(models[0].state_dict())
    (found,) = tuned.parts.substituting.found
    assert found.what == "cross_entropy chunked" and "(forward)" in found.place and found.proof
    with Operators() as seen:
        tuned([batch])
    assert "steplab.chunked_cross_entropy_mean.default" in seen.names
    assert not [name for name in seen.names if "softmax" in name]


class Operators(TorchDispatchMode):
    """Notes the names of all operators."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_model_without_such_a_head_stays_as_it_is():
    model = nn.Linear(4, 4)
    tuned = steplab.optimize(model, lambda m, x: m(x).square().mean(), "substitute=loss")
    tuned([torch.randn(3, 4)])
    assert tuned.parts.substituting.found == ()
