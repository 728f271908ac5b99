"""The loss as a module: under autocast, in a GPT, and its counted products."""

import pytest
import torch

from steplab.kernels import cross_entropy as op
from steplab.modules.loss import LinearCrossEntropy
from tests.kernels.cross_entropy_cases import Case, in_small_chunks, make, results

BF16 = torch.bfloat16
NAME = "chunked"


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch):
    in_small_chunks(monkeypatch)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("impl", ["reference", NAME])
def test_autocast_decides_the_products_and_the_weights_gradient_stays_fp32(impl, reduction):
    x, weight, targets, d_loss = make(Case(tokens=60, reduction=reduction, ignored=0.2))
    module = LinearCrossEntropy(reduction)
    module.impl = impl
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    with torch.autocast("cpu", dtype=BF16):
        loss = module(leaves[0].view(6, 10, -1), leaves[1], targets.view(6, 10))
    assert loss.dtype == torch.float32 and loss.shape == (() if reduction == "mean" else (6, 10))
    found = torch.autograd.grad(loss, leaves, d_loss.view(loss.shape))
    plain = results(impl, x.detach().to(BF16), weight.detach(), targets, d_loss, reduction)
    assert torch.equal(loss.flatten(), plain[0].flatten())
    assert [g.dtype for g in found] == [torch.float32, torch.float32]
    assert torch.equal(found[0], plain[1].float()) and torch.equal(found[1], plain[2])


def test_a_gpt_has_the_same_loss_and_gradients_by_chunks():
    from steplab.workloads.gpt.config import GPTConfig
    from steplab.workloads.gpt.model import GPT

    torch.manual_seed(0)
    model = GPT(GPTConfig(32, 64, layers=1, heads=2, context=16, vocab_size=67)).double()
    tokens, targets = torch.randint(67, (2, 3, 16))
    found = []
    for impl in ("reference", NAME):
        model.loss.impl = impl
        loss = model(tokens, targets)
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    assert model.loss.ran == NAME and model(tokens).shape == (3, 16, 67)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("products", [1, 2, 3])
def test_its_products_are_counted(products):
    """Logits, dx and dw: 2 T V D each. Losses per token compute the logits a second time."""
    from steplab.probes.work import FlopCounter

    x, weight, targets, _ = make(Case())
    x.requires_grad_(products > 1)
    weight.requires_grad_(products > 2)
    once = 2 * x.shape[0] * weight.numel()
    with FlopCounter(visible=True) as counter:
        loss = op.cross_entropy(NAME, x, weight, targets)
        losses = op.cross_entropy(NAME, x, weight, targets, "none")
        assert counter.matrix == (products + 1) * once
        if products > 1:
            (loss + losses.sum()).backward()
            assert counter.matrix == (products + 1 + products) * once
    assert not counter.uncovered


@pytest.mark.parametrize("impl", ["reference", NAME])
@pytest.mark.parametrize("mode", ["forward", "full"])
def test_the_formula_of_a_gpt_equals_its_counted_flops(impl, mode, tiny_spec):
    from steplab.probes.work import FlopCounter
    from steplab.step.assemble import assemble, micro_batches

    spec = tiny_spec(f"impl.cross_entropy={impl},impl.attention=reference", mode=mode)
    step = assemble(spec)
    with FlopCounter(visible=False) as counter:
        step(next(micro_batches(step, spec)))
    ran = {"attention": "reference", "cross_entropy": impl}
    assert step.workload.work(spec.batch, mode, ran).hardware == counter.matrix
