"""A loop with the Accelerator itself."""

import copy
import re
from pathlib import Path

import pytest
import torch

accelerate = pytest.importorskip("accelerate", reason="an optional extra, steplab[accelerate]")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

from steplab.adapters.accelerate_loop import optimize_for
from steplab.core.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore")  # of the library


@pytest.fixture(autouse=True)
def fresh_state():
    """Accelerate keeps its settings in the process."""
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    yield
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def loss(model, batch):
    return (model(batch) - batch).square().mean()


def train(accelerator, model, compute, optimizer, rows):
    loader = torch.utils.data.DataLoader(rows, batch_size=4)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            value = compute(batch)
            accelerator.backward(value)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.item())
    return losses


def test_the_lines_of_the_page_run():
    page = (Path(__file__).parents[2] / "docs" / "own_models.md").read_text()
    (lines,) = re.findall(r"^```text\n([^`]*optimize_for.*?)^```", page, re.M | re.S)
    model = torch.nn.Linear(4, 4)
    names = {"accelerator": Accelerator(cpu=True), "model": model, "loss": loss}
    names["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-2)
    names["loader"] = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4)
    before = model.weight.detach().clone()
    exec(lines.replace("recipe.toml", "plain"), names)
    assert len(names["meter"].summary().data_wait.values) == 2
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("recipe", ["plain", "optimizer=foreach"])
def test_the_loop_trains_the_same(recipe):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    twin = copy.deepcopy(model)
    rows = torch.randn(24, 4)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    make = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2)  # noqa: E731
    expected = train(accelerator, twin, lambda b: loss(twin, b), make(twin), rows)
    step, optimizer = optimize_for(accelerator, model, loss, recipe, make(model))
    found = train(accelerator, model, lambda b: step.loss(b).loss, optimizer, rows)
    assert found == pytest.approx(expected)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_what_accelerate_decides_itself_is_refused():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    with pytest.raises(UserError, match=r"precision, and mixed_precision='bf16' is set too"):
        optimize_for(accelerator, model, loss, "precision=bf16", optimizer)
    with pytest.raises(UserError, match="which Accelerate calls by itself"):
        optimize_for(accelerator, model, loss, "cuda_graph=step", optimizer)


def test_a_schedule_or_a_state_of_the_old_optimizer_is_not_lost_silently():
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(UserError, match="a schedule was made for the old one"):
        optimize_for(accelerator, model, loss, "optimizer=foreach", optimizer)
    assert optimize_for(accelerator, model, loss, "plain", optimizer)[1] is optimizer
    stepped = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    stepped.step()
    with pytest.raises(UserError, match="the old one has taken steps"):
        optimize_for(accelerator, model, loss, "optimizer=foreach", stepped)


def test_weight_decay_stays_decoupled():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=0.1, decoupled_weight_decay=True)
    _, made = optimize_for(Accelerator(cpu=True), model, loss, "optimizer=foreach", optimizer)
    assert made.param_groups[0]["decoupled_weight_decay"] and made.param_groups[0]["foreach"]


def test_the_accelerator_saves_the_model(tmp_path):
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    recipe = "precision=bf16-weights,optimizer=one-pass"
    step, optimizer = optimize_for(accelerator, model, loss, recipe, optimizer)
    optimizer = accelerator.prepare(optimizer)
    assert step.model is model and model.weight.dtype == torch.bfloat16
    accelerator.backward(step.loss(torch.randn(2, 4)).loss)
    optimizer.step()
    accelerator.save_state(tmp_path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert before["weight"].dtype == torch.float32
    for _ in range(2):
        accelerator.backward(step.loss(torch.randn(2, 4)).loss)
        optimizer.step()
    accelerator.load_state(tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_mixed_precision_of_the_accelerator_reaches_the_model():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model, seen = torch.nn.Sequential(torch.nn.Linear(4, 4)), []
    model[0].register_forward_hook(lambda module, x, y: seen.append(y.dtype))
    optimizer = torch.optim.AdamW(model.parameters())
    step, _ = optimize_for(accelerator, model, loss, "optimizer=foreach", optimizer)
    step.loss(torch.randn(2, 4))
    assert seen == [torch.bfloat16]
