"""A recipe for a loop of one's own."""

import threading

import pytest
import torch
from torch import nn

import steplab
from steplab.core.errors import Unsupported, UserError
from steplab.workloads.workload import StepOutput


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


def squares(model, batch):
    return (model(batch) - batch).square().mean()


def test_plain_is_the_loop_written_by_hand():
    torch.manual_seed(0)
    model, twin = Net(), Net()
    twin.load_state_dict(model.state_dict())
    step = steplab.optimize(
        model, squares, "plain", lambda m, **how: torch.optim.SGD(m.parameters(), 0.1)
    )
    by_hand = torch.optim.SGD(twin.parameters(), 0.1)
    for _ in range(3):
        batch = torch.randn(4, 8)
        loss = squares(twin, batch)
        loss.backward()
        by_hand.step()
        by_hand.zero_grad()
        assert torch.equal(step([batch]).loss, loss)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_techniques_reach_a_model_that_knows_nothing_of_them():
    recipe = "precision=bf16,optimizer=foreach,checkpointing=blocks,compile=blocks"
    made = []

    def optimizer(model, **how):
        made.append(how)
        return torch.optim.AdamW(model.parameters(), **how)

    step = steplab.optimize(Net(), squares, f"{recipe},compile.backend=eager", optimizer)
    assert torch.isfinite(step([torch.randn(4, 8), torch.randn(4, 8)]).loss)
    assert made == [{"foreach": True}] and step.parts.matmul_dtype == "bf16"


def test_prefetch_reads_the_loader_ahead_and_refuses_batches_that_nobody_fetched():
    torch.manual_seed(0)
    data, read = [torch.randn(4, 8) for _ in range(5)], []

    def loader():
        for batch in data:
            read.append(threading.current_thread() is threading.main_thread())
            yield {"x": batch}

    def loss(model, batch):
        return squares(model, batch["x"])

    step = steplab.optimize(Net(), loss, "prefetch=2")
    with pytest.raises(UserError, match=r"not fetched ahead.* step\.batches\(loader\)"):
        step([{"x": data[0]}])
    with pytest.raises(UserError, match="not fetched ahead"):
        step.loss({"x": data[0]})
    seen = []
    for batch in step.batches(loader()):
        seen.append(batch["x"])
        step([batch])
    assert read == [False] * 5
    assert all(torch.equal(a, b) for a, b in zip(seen, data, strict=True))
    plain = steplab.optimize(Net(), loss, "plain")
    assert len([plain([batch]) for batch in plain.batches(loader())]) == 5


def test_a_loop_may_run_its_own_backward_and_update():
    torch.manual_seed(0)
    model, twin = Net(), Net()
    twin.load_state_dict(model.state_dict())
    whole, own = (steplab.optimize(net, squares, "precision=bf16") for net in (twin, model))
    for _ in range(3):
        batch = torch.randn(4, 8)
        loss = own.loss(batch).loss
        loss.backward()
        own.optimizer.step()
        own.optimizer.zero_grad()
        assert torch.equal(whole([batch]).loss, loss)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(UserError, match=r"precision=fp16, which needs the whole step"):
        steplab.optimize(Net(), squares, "precision=fp16").loss(batch)


@pytest.mark.parametrize("recipe", ["plain", "optimizer=one-pass", "optimizer=fused"])
def test_an_update_that_was_left_in_the_loop_is_refused(recipe):
    step, batch = steplab.optimize(Net(), squares, recipe), torch.randn(4, 8)
    schedule = torch.optim.lr_scheduler.StepLR(step.optimizer, 1)
    for _ in range(2):
        step([batch])
        weights = [p.detach().clone() for p in step.model.parameters()]
        with pytest.raises(UserError, match=r"has updated the weights already\. Leave optimizer"):
            step.optimizer.step()
        schedule.step()
        assert all(map(torch.equal, weights, step.model.parameters()))
    step.loss(batch).loss.backward()
    step.optimizer.step()
    assert not any(map(torch.equal, weights, step.model.parameters()))


def test_precision_is_the_recipes_alone():
    """Inside the loop's own autocast, precision=fp32 would run in bf16."""
    step, batch = steplab.optimize(Net(), squares, "precision=fp32"), torch.ones(2, 8)
    for run in (lambda: step([batch]), lambda: step.loss(batch)):
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(UserError, match="autocast is"):
            run()
    step([batch])


def test_a_model_whose_weights_an_earlier_step_rounds_is_refused():
    model, rounding = Net(), "precision=bf16-weights,optimizer=one-pass"
    steplab.optimize(model, squares, "plain")
    steplab.optimize(model, squares, rounding)
    with pytest.raises(UserError, match=r"earlier steplab\.optimize"):
        steplab.optimize(model, squares, "compile=loss")


def test_metrics_come_through():
    step = steplab.optimize(
        Net(), lambda m, b: StepOutput(squares(m, b), {"rows": b.sum()}), steplab.Recipe()
    )
    assert set(step([torch.ones(2, 8)]).metrics) == {"rows"}


def ignoring(model, **how):
    return torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize(
    ("recipe", "model", "options", "error", "words"),
    [
        ("impl.attention=flash", Net(), {}, Unsupported, "no module that declares"),
        ("cuda_graph=step", Net(), {}, Unsupported, "cuda_graph=off"),
        ("nothing=1", Net(), {}, UserError, "no technique"),
        ("plain", nn.ReLU(), {}, UserError, "no parameters"),
        ("plain", Net(), {"mode": "sideways"}, UserError, "mode is"),
        ("checkpointing=blocks", nn.Linear(2, 2), {}, Unsupported, "checkpointing=budget"),
        ("plain", Net(), {"clip": -1.0}, UserError, "clip is -1"),
        ("plain", torch.compile(Net()), {}, UserError, "compiled already"),
        ("optimizer=fused", Net(), {"optimizer": ignoring}, UserError, "fused=True"),
        ("optimizer=foreach", Net(), {"optimizer": ignoring}, UserError, "foreach=True"),
    ],
)
def test_refusals(recipe, model, options, error, words):
    if recipe.startswith("cuda") and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(error, match=words):
        steplab.optimize(model, squares, recipe, **options)


@pytest.mark.parametrize("batch", [torch.ones(4, 8), (torch.ones(4, 8),), []])
def test_a_bare_batch_is_not_taken_apart(batch):
    model = nn.Linear(8, 1)
    step = steplab.optimize(model, lambda m, x: m(x).mean(), "plain")
    before = model.weight.detach().clone()
    with pytest.raises(UserError, match="list of micro-batches"):
        step(batch)
    assert torch.equal(before, model.weight)


def test_inputs_and_targets_are_no_two_micro_batches():
    """What a DataLoader gives for pairs is a list."""
    step = steplab.optimize(nn.Linear(8, 1), lambda m, x: m(x).mean(), "plain")
    for other in (torch.zeros(4, dtype=torch.int64), torch.zeros(4, 3)):
        with pytest.raises(UserError, match="the parts of one"):
            step([torch.ones(4, 8), other])
    step([torch.ones(4, 8), torch.ones(3, 8)])  # the last one may have fewer rows


def test_what_is_passed_by_mistake_is_named():
    model, loss = nn.Linear(8, 1), lambda m, x: m(x).mean()
    with pytest.raises(UserError, match="recipe is of type dict"):
        steplab.optimize(model, loss, {"precision": "bf16"})
    with pytest.raises(UserError, match=r"not an nn\.Module"):
        steplab.optimize(loss, loss, "plain")
    with pytest.raises(UserError, match="made by a function"):
        steplab.optimize(model, loss, "plain", torch.optim.SGD(model.parameters(), 0.1))
