"""A new run on old weights: from a checkpoint of steplab or a Time-MoE folder."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from steplab.cli.main import main
from steplab.core import TrainSettings, TrainSpec
from steplab.core.errors import UserError
from steplab.train.checkpoint import read_progress
from steplab.train.checkpoint_files import newest_checkpoint
from steplab.train.log import TrainingLog
from steplab.train.loop import Trainer
from steplab.train.pretrained import export_time_moe, find_pretrained

MODEL = """--hidden-size 16 --n-decoder-layers 1 --n-head 2 --num-experts 2 --d-ff 16 --d-expert 8
--seq-max-len 40 --horizons 1,8 --layout time-moe""".split()
SHORT = "--batch-size 2 --steps-per-epoch 4 --log-every 2 --validation-batches 1".split()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with a trained model: `base/checkpoints`, and the same as `base/time-moe`."""
    folder = tmp_path_factory.mktemp("base")
    checkpoints = folder / "checkpoints"
    assert main(["train", *MODEL, *SHORT, "--checkpoint-dir", str(checkpoints)]) == 0
    export_time_moe(checkpoints, folder / "time-moe")
    return folder


def tune(source, folder, *words):
    paths = ["--from-checkpoint", str(source), "--checkpoint-dir", str(folder)]
    return main(["train", *paths, *SHORT, *words])


def weights(folder):
    return load_file(newest_checkpoint(folder) / "model.safetensors")


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def new_trainer(base, source, **config):
    origin = find_pretrained(base / source)
    settings = TrainSettings(batch_size=2, from_checkpoint=str(base / source))
    spec = TrainSpec("tsmoe", {**origin.config, **config}, settings=settings)
    return Trainer(spec, TrainingLog(lambda line: None, None, perf=False))


@pytest.mark.parametrize("source", ["checkpoints", "time-moe"])
def test_only_the_weights_are_taken(source, base):
    new = new_trainer(base, source)
    fresh = {name: p.clone() for name, p in new.step.model.state_dict().items()}
    new.start_from(base / source)
    taken = new.step.model.state_dict()
    assert equal(taken, weights(base / "checkpoints")) and not equal(taken, fresh)
    assert not new.step.optimizer.state and new.step_number == 0 and new.position.index == 0


def test_the_run_is_new_and_says_where_it_came_from(base, tmp_path, capsys):
    assert tune(base / "checkpoints", tmp_path / "t", "--lr", "1e-4", "--seed", "7") == 0
    source = base / "checkpoints" / "step-00000004"
    assert f"weights of {source}" in capsys.readouterr().out
    progress = read_progress(tmp_path / "t")
    assert progress.step == 4 and progress.spec["settings"]["from_checkpoint"] == str(source)
    assert progress.spec["config"] == read_progress(source).spec["config"]
    rates = [
        row["train/lr"]
        for row in map(json.loads, (tmp_path / "t" / "metrics.jsonl").read_text().splitlines())
        if "train/lr" in row
    ]
    assert max(rates) <= 1e-4  # its own schedule, not the old one's 1e-3


def test_a_time_moe_folder_trains_as_the_checkpoint_does(base, tmp_path):
    assert tune(base / "checkpoints", tmp_path / "a") == 0
    assert tune(base / "time-moe", tmp_path / "b", "--huber-delta", "2.0") == 0
    assert equal(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not equal(weights(tmp_path / "a"), weights(base / "checkpoints"))


def test_a_tuned_run_resumes_without_its_origin(base, tmp_path, capsys):
    shutil.copytree(base / "checkpoints", tmp_path / "origin")
    words = ["--epochs", "2", "--checkpoint-every", "4"]
    assert tune(tmp_path / "origin", tmp_path / "whole", *words) == 0
    shutil.rmtree(tmp_path / "origin")
    shutil.copytree(tmp_path / "whole" / "step-00000004", tmp_path / "half" / "step-00000004")
    assert main(["train", "--resume", str(tmp_path / "half")]) == 0
    assert "resumed" in capsys.readouterr().out and read_progress(tmp_path / "half").step == 8
    assert equal(weights(tmp_path / "half"), weights(tmp_path / "whole"))
    other = ["--from-checkpoint", str(base / "time-moe")]
    assert main(["train", "--resume", str(tmp_path / "half"), *other]) == 2
    assert "--from-checkpoint" in capsys.readouterr().err


def test_windows_and_losses_may_change(base, tmp_path):
    words = ["--seq-max-len", "24", "--aux-factor", "0.1", "--huber-delta", "1.0"]
    assert tune(base / "time-moe", tmp_path / "t", *words) == 0
    config = read_progress(tmp_path / "t").spec["config"]
    assert (config["seq_max_len"], config["aux_factor"], config["huber_delta"]) == (24, 0.1, 1.0)
    assert tune(base / "checkpoints", tmp_path / "u", "--hidden-size", "16") == 0  # as it is


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hidden-size", "32"], "--hidden-size 32 contradicts"),
        (["--horizons", "1,4"], "which has '1,8'"),
        (["--quantiles", "0.5"], "--quantiles 0.5 contradicts"),
        (["--rope-theta", "5"], "--rope-theta 5.0 contradicts"),
        (["--layout", "gelu"], "Leave --layout out"),
        (["--size", "small"], "--size small contradicts"),
        (["--seq-max-len", "8"], "not longer than the longest horizon"),
        (["--recipe", "nothing=1"], "nothing"),
    ],
)
@pytest.mark.parametrize("source", ["checkpoints", "time-moe"])
def test_flags_against_the_weights_are_refused(source, words, said, base, tmp_path, capsys):
    assert tune(base / source, tmp_path / "t", *words) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1
    assert not (tmp_path / "t").exists()


def test_bad_origins_are_one_sentence(base, tmp_path, capsys):
    assert main(["train", "gpt", "--from-checkpoint", str(base / "checkpoints")]) == 2
    assert "is a model of tsmoe, not of gpt" in capsys.readouterr().err
    for source, said in (
        (tmp_path / "nowhere", "no checkpoint"),
        (tmp_path, "no checkpoint in"),
        (base / "time-moe" / "model.safetensors", "is a file"),
    ):
        assert tune(source, tmp_path / "t") == 2
        assert said in capsys.readouterr().err
    shutil.copytree(base / "time-moe", tmp_path / "cut")
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    assert tune(tmp_path / "cut", tmp_path / "t") == 2
    assert "cannot be read" in capsys.readouterr().err
    (tmp_path / "cut" / "config.json").write_text('{"model_type": "llama"}')
    assert tune(tmp_path / "cut", tmp_path / "t") == 2
    assert "another kind of model" in capsys.readouterr().err


def test_a_spec_that_contradicts_its_origin_is_refused(base):
    """Also one that no command line made: rope_theta has no shape that would tell."""
    for source in ("checkpoints", "time-moe"):
        with pytest.raises(UserError, match="rope-theta"):
            new_trainer(base, source, rope_theta=7.0).start_from(base / source)
