"""A loop of one's own with a real CUDA graph, against the same step without it."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import steplab
from steplab.core.errors import Unsupported
from tests.step.test_own_loop import Net, adamw, loss_of, sgd

pytestmark = pytest.mark.gpu


class Pair:
    """The same step with and without the graph."""

    def __init__(self, recipe, optimizer, clip=0.0):
        torch.manual_seed(0)
        plain = Net().cuda()
        self.models = (copy.deepcopy(plain), plain)
        recipes = (f"{recipe},cuda_graph=step", recipe)
        self.steps = [
            steplab.optimize(model, loss_of, words, optimizer, clip=clip)
            for model, words in zip(self.models, recipes, strict=True)
        ]

    def train(self, *rows, micro_batches=1):
        for count in rows:
            batches = [torch.randn(count, 8, device="cuda") for _ in range(micro_batches)]
            seen, expected = (step(batches).loss for step in self.steps)
            assert torch.allclose(seen, expected, rtol=1e-5)

    def assert_close(self):
        for ours, theirs in zip(*(model.parameters() for model in self.models), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)
            assert torch.allclose(ours.grad, theirs.grad, rtol=1e-4, atol=1e-7)

    @property
    def captures(self):
        return self.steps[0].graph.call.captures


@pytest.mark.parametrize(
    ("recipe", "optimizer"),
    [("optimizer=one-pass", adamw), ("optimizer=fused", adamw), ("optimizer=foreach", sgd)],
)
def test_schedules_odd_batches_and_gradients(recipe, optimizer):
    pair = Pair(recipe, optimizer)
    schedulers = [lr_scheduler.CosineAnnealingLR(step.optimizer, 20) for step in pair.steps]
    for rows in (4, 4, 4, 4, 4, 3, 4, 4):
        pair.train(rows)
        pair.assert_close()
        for scheduler in schedulers:
            scheduler.step()
    for number in range(4):
        for step in pair.steps:
            step.optimizer.param_groups[0]["lr"] = 0.01 / (number + 1)
        pair.train(4)
    pair.train(4, micro_batches=2)
    pair.train(4, 4)
    pair.assert_close()
    assert pair.captures == 1


@pytest.mark.filterwarnings("ignore:.*has changed, which the CUDA graph")
def test_numbers_of_the_update_that_change_at_every_step():
    pair = Pair("optimizer=fused", adamw)
    for number in range(12):
        for step in pair.steps:
            step.optimizer.param_groups[0]["weight_decay"] = 0.1 * number
        pair.train(4)
    pair.assert_close()
    assert pair.captures <= 2


def test_evaluation_frozen_layers_exchanged_weights_and_a_restart():
    pair = Pair("compile=blocks,optimizer=one-pass", adamw)
    pair.train(*[4] * 6)
    for model in pair.models:
        with torch.no_grad():
            loss_of(model.eval(), torch.randn(4, 8, device="cuda"))
        model.train()
    pair.train(*[4] * 6)
    for model in pair.models:
        model.blocks[0].requires_grad_(False)
    pair.train(*[4] * 6)
    saved = copy.deepcopy(
        [(step.model.state_dict(), step.optimizer.state_dict()) for step in pair.steps]
    )
    pair.train(*[4] * 2)
    for model, step, (weights, state) in zip(pair.models, pair.steps, saved, strict=True):
        model.load_state_dict(weights)
        step.optimizer.load_state_dict(state)
    pair.train(*[4] * 6)
    for ours, theirs in zip(*(model.parameters() for model in pair.models), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_hook_is_refused_when_the_step_is_made():
    model = nn.Sequential(nn.Linear(8, 8)).cuda()
    model[0].register_forward_hook(lambda *_: None)
    with pytest.raises(Unsupported, match="0 has a forward hook"):
        steplab.optimize(model, loss_of, "cuda_graph=step", adamw)
