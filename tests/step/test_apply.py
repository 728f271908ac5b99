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
    step = steplab.apply(
        "plain", model, squares, lambda m, **how: torch.optim.SGD(m.parameters(), 0.1)
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

    step = steplab.apply(f"{recipe},compile.backend=eager", Net(), squares, optimizer)
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

    step = steplab.apply("prefetch=2", Net(), loss)
    with pytest.raises(UserError, match=r"not fetched ahead.* step\.batches\(loader\)"):
        step([{"x": data[0]}])
    seen = []
    for batch in step.batches(loader()):
        seen.append(batch["x"])
        step([batch])
    assert read == [False] * 5
    assert all(torch.equal(a, b) for a, b in zip(seen, data, strict=True))
    plain = steplab.apply("plain", Net(), loss)
    assert len([plain([batch]) for batch in plain.batches(loader())]) == 5


def test_metrics_come_through():
    step = steplab.apply(
        steplab.Recipe(), Net(), lambda m, b: StepOutput(squares(m, b), {"rows": b.sum()})
    )
    assert set(step([torch.ones(2, 8)]).metrics) == {"rows"}


@pytest.mark.parametrize(
    ("recipe", "model", "options", "error", "words"),
    [
        ("impl.attention=flash", Net(), {}, Unsupported, "no module that declares"),
        ("cuda_graph=step", Net(), {}, Unsupported, "cuda_graph=off"),
        ("nothing=1", Net(), {}, UserError, "no technique"),
        ("plain", nn.ReLU(), {}, UserError, "no parameters"),
        ("plain", Net(), {"mode": "sideways"}, UserError, "mode is"),
        ("checkpointing=blocks", nn.Linear(2, 2), {}, Unsupported, "checkpointing=budget"),
    ],
)
def test_refusals(recipe, model, options, error, words):
    if recipe.startswith("cuda") and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(error, match=words):
        steplab.apply(recipe, model, squares, **options)


@pytest.mark.parametrize("batch", [torch.ones(4, 8), (torch.ones(4, 8),), []])
def test_a_bare_batch_is_not_taken_apart(batch):
    model = nn.Linear(8, 1)
    step = steplab.apply("plain", model, lambda m, x: m(x).mean())
    before = model.weight.detach().clone()
    with pytest.raises(UserError, match="list of micro-batches"):
        step(batch)
    assert torch.equal(before, model.weight)


def test_what_is_passed_by_mistake_is_named():
    model, loss = nn.Linear(8, 1), lambda m, x: m(x).mean()
    with pytest.raises(UserError, match="recipe is of type dict"):
        steplab.apply({"precision": "bf16"}, model, loss)
    with pytest.raises(UserError, match=r"not an nn\.Module"):
        steplab.apply("plain", loss, loss)
    with pytest.raises(UserError, match="made by a function"):
        steplab.apply("plain", model, loss, torch.optim.SGD(model.parameters(), 0.1))
