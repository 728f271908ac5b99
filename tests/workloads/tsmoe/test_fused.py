"""The mixture with fused layers on CPU, where torch stands in for their kernels."""

import pytest
import torch

from steplab.kernels import experts, feed_forward
from steplab.probes.work import FlopCounter
from steplab.workloads.tsmoe.config import TsmoeConfig
from steplab.workloads.tsmoe.flops import work
from steplab.workloads.tsmoe.model import Tsmoe

SHAPE = {"hidden_size": 32, "n_decoder_layers": 2, "n_head": 2, "num_experts": 4, "d_ff": 32}


def build(layout, monkeypatch, **impls):
    """Return a model of fused layers, and its configuration."""
    for op in (experts, feed_forward):
        monkeypatch.setattr(op.IMPLS["fused"], "refuse", lambda *inputs: "")
    config = TsmoeConfig(**SHAPE, d_expert=16, seq_max_len=72, layout=layout)
    torch.manual_seed(0)
    model = Tsmoe(config)
    for module in model.modules():
        if hasattr(module, "op"):
            module.impl = impls.get(module.op, "auto")
    return model, config


def losses_and_gradients(model):
    torch.manual_seed(1)
    loss = model(torch.randn(2, 73), torch.ones(2, 73, dtype=torch.bool)).total
    loss.backward()
    return loss.item(), [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("layout", ["gelu", "time-moe"])
def test_fused_layers_give_the_loss_and_gradients_of_the_definition(layout, monkeypatch):
    fused, _ = build(layout, monkeypatch, experts="fused", feed_forward="fused")
    plain, _ = build(layout, monkeypatch, experts="loop", feed_forward="reference")
    (loss, gradients), (expected, theirs) = map(losses_and_gradients, (fused, plain))
    assert loss == pytest.approx(expected, rel=1e-5)
    for a, b in zip(gradients, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("layout", ["gelu", "time-moe"])
def test_counted_flops_equal_the_formula(layout, monkeypatch):
    """Forward, and three times that with the backward: nothing is multiplied twice."""
    impls = {"attention": "reference", "experts": "fused", "feed_forward": "fused"}
    model, config = build(layout, monkeypatch, **impls)
    with FlopCounter(visible=False) as forward:
        loss = model(torch.randn(2, 73), torch.ones(2, 73, dtype=torch.bool)).total
    with FlopCounter(visible=False) as backward:
        loss.backward()
    assert not forward.uncovered and not backward.uncovered
    assert forward.matrix == work(config, 2, "forward", {}).palm
    # The first layer's input gets no gradient: its two products have one backward product each.
    no_input_gradient = 2 * 2 * 72 * (2 * config.hidden_size)
    assert backward.matrix == 2 * forward.matrix - no_input_gradient
