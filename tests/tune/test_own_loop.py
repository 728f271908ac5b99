"""The lines that put a winner into somebody's loop run as they are printed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import steplab
from steplab.core import PLAIN, RunSpec
from steplab.core.ladder import Ladder
from steplab.techniques.recipes import parse_recipe
from steplab.tune.own_loop import own_loop_lines
from tests.compare.sides import ENVIRONMENT

OWN = RunSpec("my_model.py:make", clip=0.5)


def lines_of(spec, winner=PLAIN, clip_is_theirs=True, recipe=Path("r.toml")):
    ladder = Ladder("id", spec, ENVIRONMENT, winner=winner)
    return own_loop_lines(ladder, recipe, clip_is_theirs)


def train_by(lines, loss, loader):
    """Run the lines of Python among those that are printed; return what they leave behind."""
    code = "\n".join(line.removeprefix("  ") for line in lines[1:] if "instead of what" not in line)
    torch.manual_seed(0)
    names = {
        "steplab": steplab,
        "model": Model(),
        "loss": loss,
        "loader": loader,
        "optimizer": lambda model, **how: torch.optim.SGD(model.parameters(), lr=0.1, **how),
    }
    exec(code.partition("in the Trainer")[0], names)
    return names


class Model(nn.Module):
    """Returns its loss as the models of Hugging Face do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        return type("Output", (), {"loss": self.layer(x).square().mean()})


def batches(count):
    draw = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(4, 3, generator=draw)} for _ in range(count)]


@pytest.mark.parametrize(("accumulate", "updates"), [(1, 5), (2, 3)])
def test_the_lines_train_as_a_loop_by_hand_does(accumulate, updates, tmp_path):
    """Five batches; with two a step, the last step has one."""
    path = tmp_path / "r.toml"
    path.write_text("")
    data = batches(5)
    spec = replace(OWN, accumulate=accumulate)
    names = train_by(lines_of(spec, recipe=path), lambda model, batch: model(**batch).loss, data)
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for begin in range(0, 5, accumulate):
        parts = data[begin : begin + accumulate]
        for batch in parts:
            (model(**batch).loss / len(parts)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        updates -= 1
    assert updates == 0
    torch.testing.assert_close(names["model"].state_dict(), model.state_dict(), rtol=0, atol=0)
    assert names["output"].loss > 0


def test_a_hugging_face_model_has_its_loss_and_is_shown_the_trainer(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text("")
    lines = lines_of(replace(OWN, workload="hf:llama"), recipe=path)
    assert "loss(model, batch)" not in lines[0]
    assert train_by(lines, None, batches(2))["output"].loss > 0
    assert lines[-1].startswith("in the Trainer: class MyTrainer(RecipeMixin, Trainer): recipe = ")
    assert "Trainer" not in str(lines_of(OWN))


def test_a_clip_that_is_only_the_default_is_told_and_not_added():
    theirs = lines_of(replace(OWN, clip=1.0))
    recipe = str(Path("r.toml").absolute())
    assert theirs[1] == f"  step = steplab.optimize(model, loss, {recipe!r}, optimizer, clip=1)"
    assert "clip_grad_norm_" in theirs[4] and len(theirs) == 5
    default = lines_of(replace(OWN, clip=1.0), clip_is_theirs=False)
    assert default[1] == f"  step = steplab.optimize(model, loss, {recipe!r}, optimizer)"
    assert "clip_grad_norm_" not in default[4]
    assert "clipped to the norm 1, the default" in default[5] and "--clip 0" in default[5]
    none = lines_of(replace(OWN, clip=0.0))
    assert "clip" not in " ".join(none)


def test_what_a_loop_compiles_or_rounds_itself_goes_also_where_the_winner_does_not():
    """The step was measured without it."""
    gone = "torch.autocast, GradScaler, torch.compile, backward(), optimizer.step() and zero_grad"
    spec = replace(OWN, workload="script:train.py", clip=0.0)
    for words in ("optimizer=fused", "precision=bf16,compile=blocks"):
        lines = lines_of(spec, parse_recipe(words))
        assert lines[4] == f"  instead of what your loop has of {gone}()"
    shared = lines_of(spec, parse_recipe("parallel=ddp"))[4]
    assert "torch.compile, DistributedDataParallel" in shared


def test_a_script_that_has_the_winner_already_has_nothing_to_change():
    winner = parse_recipe("precision=bf16")
    ladder = Ladder("id", replace(OWN, workload="script:train.py"), ENVIRONMENT, winner=winner)
    assert own_loop_lines(ladder, Path("r.toml"), True)
    assert own_loop_lines(replace(ladder, own=winner), Path("r.toml"), True) == []


def test_only_models_of_ones_own_that_are_trained_have_a_loop():
    assert lines_of(replace(OWN, workload="gpt")) == []
    assert lines_of(replace(OWN, mode="infer")) == []
