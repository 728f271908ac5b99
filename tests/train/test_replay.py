"""Steps that are computed again must have the losses that were logged."""

import json
from dataclasses import replace

import pytest
import torch

from steplab.core.errors import MeasurementError
from steplab.techniques.recipes import parse_recipe
from steplab.train.checkpoint_files import list_checkpoints
from steplab.train.loop import Trainer, train
from steplab.train.replay import Replay, run_identity
from steplab.train.stop import Stop
from tests.train.tiny_runs import make_spec, silent

CPU = torch.device("cpu")
SETTINGS = {"steps_per_epoch": 10, "checkpoint_every": 4, "log_every": 3, "validation_batches": 0}


@pytest.fixture
def trained(tmp_path):
    spec = make_spec(tmp_path, **SETTINGS)
    train(spec, silent(tmp_path), Stop())
    return spec


def rows(folder):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if "train/loss" in row]


def test_rows_tell_their_run_their_steps_and_the_windows_so_far(trained, tmp_path):
    found = rows(tmp_path)
    assert [(row["step"], row["steps"]) for row in found] == [
        (3, 3), (4, 1), (6, 2), (8, 2), (9, 1), (10, 1),
    ]  # fmt: skip
    windows = [(row["epoch"], row["index"]) for row in found]
    assert windows == [(0, 4 * row["step"]) for row in found]
    assert len({row["run"] for row in found}) == 1


def test_going_back_repeats_the_log(trained, tmp_path):
    first = rows(tmp_path)
    train(trained, silent(tmp_path), Stop(), list_checkpoints(tmp_path)[0])
    again = rows(tmp_path)[len(first) :]
    assert [(row["step"], row["train/loss"]) for row in again] == [
        (row["step"], row["train/loss"]) for row in first[2:]
    ]


def test_a_run_without_a_checkpoint_begins_anew_and_repeats_the_log(trained, tmp_path):
    for path in list_checkpoints(tmp_path):
        path.rename(tmp_path / f"away {path.name}")
    train(trained, silent(tmp_path), Stop())
    losses = [row["train/loss"] for row in rows(tmp_path)]
    assert losses[:6] == losses[6:]


def test_another_loss_stops_the_run_and_says_so(trained, tmp_path, monkeypatch):
    one_step = Trainer._one_step

    def skips_a_batch(self, loader):
        if self.step_number == 6:
            next(loader)
        one_step(self, loader)

    monkeypatch.setattr(Trainer, "_one_step", skips_a_batch)
    with pytest.raises(MeasurementError, match=r"Step 8 was logged with loss .* computed again"):
        train(trained, silent(tmp_path), Stop(), list_checkpoints(tmp_path)[0])


def test_another_run_in_the_same_folder_is_not_compared(trained, tmp_path):
    other = replace(trained, settings=replace(trained.settings, epochs=2))
    train(other, silent(tmp_path), Stop(), list_checkpoints(tmp_path)[0])


def test_damaged_rows_are_passed_over(tmp_path):
    log = tmp_path / "metrics.jsonl"
    good = {"step": 5, "steps": 2, "train/loss": 1.5, "run": "r"}
    odd = json.dumps({**good, "step": [5]})
    lines = ['{"step": 4, "tr', "[]", "[" * 100_000, '{"train/loss": 1.0}', odd, json.dumps(good)]
    log.write_text("\n".join(lines))
    replay = Replay(log, "r", 3, on_gpu=False)
    assert replay.logged == {(5, 2): 1.5}
    replay.check(4, 1, 9.0)
    with pytest.raises(MeasurementError, match=r"move metrics\.jsonl away"):
        replay.check(5, 2, 1.5000001)
    Replay(log, "r", 3, on_gpu=True).check(5, 2, 1.5000001)
    assert Replay(log, "r", 5, on_gpu=False).logged == {}
    assert Replay(tmp_path / "none", "r", 0, on_gpu=False).logged == {}


def test_what_makes_the_same_run(tmp_path):
    spec = make_spec(tmp_path, accumulate=4)
    same = run_identity(spec, "d", CPU)
    log_more = replace(spec, settings=replace(spec.settings, log_every=1, checkpoint_dir="x"))
    assert run_identity(log_more, "d", CPU) == same
    longer = replace(spec, settings=replace(spec.settings, epochs=2))
    two = replace(spec, ranks=2, settings=replace(spec.settings, accumulate=2))
    assert len({same, *(run_identity(s, "d", CPU) for s in (longer, two))}) == 3
    assert run_identity(spec, "other", CPU) != same
    exact = [
        replace(s, recipe=parse_recipe("parallel=fsdp,parallel.exact=true")) for s in (spec, two)
    ]
    assert run_identity(exact[0], "d", CPU) == run_identity(exact[1], "d", CPU)
