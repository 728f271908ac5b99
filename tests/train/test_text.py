"""Training on text: loss falls, resume is exact, what is for series is refused."""

import pytest
import torch

from steplab.core import TrainSettings, TrainSpec
from steplab.core.errors import UserError
from steplab.techniques.recipes import parse_recipe
from steplab.train.checkpoint import load_weights
from steplab.train.checkpoint_files import newest_checkpoint
from steplab.train.data import describe_data, training_windows, validation_windows
from steplab.train.log import TrainingLog
from steplab.train.loop import train
from steplab.train.stop import Stop
from steplab.workloads.workload import find_workload

SHAPE = {
    "width": 32, "ff_width": 32, "blocks": 3, "heads": 2, "kv_heads": 1, "context": 16,
    "router_warmup": 5, "mor": "masked",
}  # fmt: skip


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return path


def make_spec(folder, text, recipe="plain", config=None, **settings) -> TrainSpec:
    resolved = find_workload("hydra").resolve("tiny", {**SHAPE, **(config or {})})
    chosen = {
        "dataset_path": str(text), "steps_per_epoch": 20, "batch_size": 4, "log_every": 5,
        "validate_every": 0, "checkpoint_every": 10, "checkpoint_dir": str(folder), "lr": 5e-3,
    }  # fmt: skip
    settings = TrainSettings(**chosen | settings)
    return TrainSpec("hydra", resolved, "tiny", parse_recipe(recipe), "cpu", settings)


def run(spec, lines=None, resume=None):
    said = [] if lines is None else lines
    return train(spec, TrainingLog(said.append, None, perf=False), Stop(), resume)


def state_of(path, spec):
    model = find_workload("hydra").open(spec.config).model()
    load_weights(path, model)
    return model.state_dict()


def test_the_loss_falls(tmp_path, text):
    lines = []
    spec = make_spec(tmp_path / "a", text, val_path=str(text), steps_per_epoch=60, log_every=20)
    outcome = run(spec, lines)
    losses = [float(line.split("pred=")[1].split()[0]) for line in lines if "pred=" in line]
    assert len(losses) == 6 and losses[-1] < 3.0 < 4.0 < losses[0]  # before every save, too
    assert outcome.metrics["val"] < 3.0
    assert f"data text={text} bytes=9,000 files=1 windows=562" in lines


@pytest.mark.parametrize("recipe", ["plain", "precision=bf16"])
def test_20_steps_equal_10_and_resume_and_10(tmp_path, text, recipe):
    whole = make_spec(tmp_path / "whole", text, recipe)
    run(whole)
    again = make_spec(tmp_path / "again", text, recipe)
    run(again, resume=tmp_path / "whole" / "step-00000010")
    one = state_of(newest_checkpoint(tmp_path / "whole"), whole)
    two = state_of(newest_checkpoint(tmp_path / "again"), again)
    assert one.keys() == two.keys()
    # The running thresholds and means are part of it.
    assert float(one["router_losses.advantage.updates"]) == 20
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


def test_other_text_is_not_gone_on_with(tmp_path, text):
    spec = make_spec(tmp_path / "a", text)
    run(spec)
    text.write_text("another text of another length. " * 300)
    with pytest.raises(UserError, match="other series"):
        run(spec, resume=newest_checkpoint(tmp_path / "a"))


@pytest.mark.parametrize(
    ("settings", "config", "words"),
    [
        ({"pack": True}, {}, "--pack is for series"),
        ({"normalize": "max"}, {}, "--normalize is for series"),
        ({}, {"vocab_size": 200}, "no room for all bytes"),
        ({}, {"context": 8192}, "do not fill|fills? no"),
    ],
)
def test_what_does_not_fit_text_is_refused(tmp_path, text, settings, config, words):
    if "context" in config:
        text.write_text("short")
    with pytest.raises(UserError, match=words):
        training_windows(make_spec(tmp_path, text, config=config, **settings))


def test_without_a_path_it_is_pythons_own_sources(tmp_path):
    spec = make_spec(tmp_path, "", ood_path=__file__)
    windows = training_windows(spec)
    assert describe_data(windows, spec).startswith("data text=Python's standard library bytes=")
    held_out = validation_windows(spec)
    assert set(held_out) == {"val", "ood"} and len(held_out["val"]) > 1000
    assert set(validation_windows(make_spec(tmp_path, __file__))) == set()
