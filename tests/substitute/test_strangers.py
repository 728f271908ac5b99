"""Models by a stranger, who knew the docs and not the code: replaced or not, never wrong."""

import copy

import pytest
import torch

from steplab.substitute.backend import SubstitutingBackend
from steplab.substitute.feed_forward import FusedFeedForward
from steplab.substitute.norm import FusedNorm
from tests.substitute.strangers import attentions, losses, norms
from tests.substitute.strangers.case import VOCAB

CASES = [
    *losses.CASES,
    *attentions.CASES,
    *(pytest.param(case, marks=pytest.mark.slow) for case in norms.CASES),  # 15 s in all
]
KINDS = ("attention", "loss")
# By the definition, which a CPU can run.
BY_DEFINITION = {"norm": FusedNorm("reference"), "feed_forward": FusedFeedForward("reference")}


def step(call, model, batch):
    """Return loss, gradients and buffers of one step; a weight without a gradient has zeros."""
    model.zero_grad()
    torch.manual_seed(0)
    loss = call(model, batch)
    loss.backward()
    weights = dict(model.named_parameters())
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in weights.items()}
    return {"loss": loss.detach(), **gradients, **dict(model.named_buffers())}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_steps_are_those_of_the_model(case):
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = case.model().double()
    ours = copy.deepcopy(plain)
    backend = SubstitutingBackend(KINDS).before("eager")
    backend.rewrites = {**backend.rewrites, **BY_DEFINITION}
    compiled = torch.compile(case.loss, backend=backend)
    generator = torch.Generator().manual_seed(1)
    for shape in case.shapes:
        batch = tuple(torch.randint(VOCAB, shape, generator=generator) for _ in range(2))
        expected, found = step(case.loss, plain, batch), step(compiled, ours, batch)
        for name, truth in expected.items():
            error = (found[name].double() - truth.double()).norm()
            allowed = case.exact * truth.double().norm().clamp_min(1e-6)
            assert error <= allowed, (name, backend.found)
        with torch.no_grad():
            for weight, same in zip(plain.parameters(), ours.parameters(), strict=True):
                weight -= 0.05 * weight.grad if weight.grad is not None else 0
                same.copy_(weight)
    replaced = [one for one in backend.found if one.what]
    assert bool(replaced) == case.replaced, backend.found
    assert all(one.reason for one in backend.found if not one.what)
