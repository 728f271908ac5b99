"""Runs of `steplab train` that take a second, and what their checkpoints hold."""

from pathlib import Path

import torch

from steplab.core import TrainSettings, TrainSpec
from steplab.techniques.recipes import parse_recipe
from steplab.train.checkpoint import restore_checkpoint
from steplab.train.checkpoint_files import newest_checkpoint
from steplab.train.log import TrainingLog
from steplab.train.loop import Trainer
from steplab.train.stop import Stop
from steplab.workloads.workload import find_workload

SHAPE = {
    "hidden_size": 16, "n_decoder_layers": 2, "n_head": 2, "num_experts": 4, "d_ff": 16,
    "d_expert": 8, "seq_max_len": 40, "horizons": "1,8",
}  # fmt: skip


def make_spec(folder, recipe="plain", config=None, **settings) -> TrainSpec:
    resolved = find_workload("tsmoe").resolve("tiny", {**SHAPE, **(config or {})})
    chosen = {
        "steps_per_epoch": 20, "batch_size": 4, "log_every": 5, "validate_every": 0,
        "validation_batches": 1, "checkpoint_every": 10, "checkpoint_dir": str(folder),
    }  # fmt: skip
    return TrainSpec(
        "tsmoe", resolved, "tiny", parse_recipe(recipe), "cpu", TrainSettings(**chosen | settings)
    )


def silent(folder=None) -> TrainingLog:
    return TrainingLog(lambda line: None, folder, perf=False)


class StopAfter(Stop):
    """A stop that is requested once `steps` steps are over."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.left = steps + 1  # the loop asks before every step

    def __getattribute__(self, name):
        if name == "requested":
            self.left -= 1
            return self.left <= 0
        return super().__getattribute__(name)


def state_of(path: Path, spec: TrainSpec) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint, by name."""
    step = Trainer(spec, silent()).step
    restore_checkpoint(path, step.model, step.optimizer, step.parts.scaler)
    names = dict(step.model.named_parameters())
    found = {f"weight/{name}": p.detach().clone() for name, p in names.items()}
    for name, p in names.items():
        for key, value in step.optimizer.state[p].items():
            found[f"{key}/{name}"] = torch.as_tensor(value).clone()
    return found


def assert_same_state(one: Path, other: Path, spec: TrainSpec) -> None:
    """Compare the newest checkpoints of two folders, bit for bit."""
    a, b = (state_of(newest_checkpoint(folder), spec) for folder in (one, other))
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert different == []
