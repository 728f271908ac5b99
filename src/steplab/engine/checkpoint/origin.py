"""Where a training takes its first weights from: a checkpoint, or a Time-MoE folder.

Finding one needs no torch; loading does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steplab.codec import decode, encode
from steplab.engine.checkpoint.folder import find
from steplab.engine.checkpoint.restoring import load_weights, read_progress
from steplab.errors import UserError
from steplab.spec.training import TrainSpec
from steplab.workloads.tsmoe import time_moe
from steplab.workloads.workload import find_workload

if TYPE_CHECKING:
    from torch import nn

# Fields of a config that say how to train and not what the weights mean.
FREE = frozenset({"seq_max_len", "aux_factor", "huber_delta"})


@dataclass(frozen=True)
class Origin:
    """Trained weights and the model that they belong to."""

    path: Path  # the checkpoint itself, never a folder of checkpoints
    workload: str
    config: Mapping[str, Any]
    size: str = ""

    def config_with(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return its config with some fields changed; those that the weights decide cannot be."""
        for name, value in changes.items():
            if name not in FREE and self.config.get(name) != value:
                raise self.conflict(name, value, self.config.get(name))
        return find_workload(self.workload).resolve("", {**self.config, **changes})

    def conflict(self, name: str, asked: Any, has: Any) -> UserError:
        """Return the error for a flag that contradicts the weights."""
        flag = name.replace("_", "-")
        return UserError(
            f"--{flag} {asked} contradicts {self.path}, which has {has!r}.",
            f"Leave --{flag} out: the model is taken from the weights.",
        )


def find_origin(path: Path) -> Origin:
    """Return what lies at `path`: a Time-MoE folder, a checkpoint, or a folder's newest one."""
    if time_moe.is_time_moe(path):
        return Origin(path, "tsmoe", encode(time_moe.read_config(path)))
    path = find(path)
    spec: TrainSpec = decode(TrainSpec, dict(read_progress(path).spec), f"{path}: spec")
    config = find_workload(spec.workload).resolve("", spec.config)  # fields of later versions too
    return Origin(path, spec.workload, config, spec.size)


def load_origin(path: Path, model: nn.Module, config: Mapping[str, Any]) -> None:
    """Load the weights at `path` alone, all or none, into a model of that config."""
    origin = find_origin(path)
    origin.config_with(config)
    if time_moe.is_time_moe(path):
        time_moe.load_weights(path, model)  # type: ignore[arg-type]
    else:
        load_weights(origin.path, model)
