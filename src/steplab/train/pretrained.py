"""Trained models: weights of a checkpoint or of a Time-MoE folder, and back into a Time-MoE folder.

Finding them needs no torch; loading and exporting import it.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steplab.core import Recipe, TrainSettings, TrainSpec
from steplab.core.atomic import disk_errors, sync_folder, write_file
from steplab.core.codec import decode, encode
from steplab.core.errors import UserError
from steplab.train.checkpoint import load_weights, open_weights, read_progress
from steplab.train.checkpoint_files import (
    MODEL_FILE,
    bytes_of_weights,
    find_checkpoint,
    new_draft,
    newest_checkpoint,
    read_verified_manifest,
)
from steplab.workloads.recorded import note_on_code, workload_of_record
from steplab.workloads.tsmoe import time_moe
from steplab.workloads.tsmoe.config import TsmoeConfig
from steplab.workloads.tsmoe.time_moe import (
    CONFIG_FILE,
    SINGLE_FILE,
    parameter_slices,
    render_config,
)
from steplab.workloads.workload import WorkloadEntry

if TYPE_CHECKING:
    from torch import nn

ForwardContext = Callable[[], contextlib.AbstractContextManager[Any]]

# Fields of a config that say how to train, not what the weights mean.
TRAINING_FIELDS = frozenset({"seq_max_len", "aux_factor", "huber_delta"})


@dataclass(frozen=True)
class Pretrained:
    """Trained weights and the model that they belong to."""

    path: Path  # the checkpoint itself, never a folder of checkpoints
    workload: WorkloadEntry
    config: Mapping[str, Any]
    size: str = ""
    note: str = ""  # that it was made with other code, for a user's own model

    def config_with(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return its config with some fields changed; those that fix the weights are refused."""
        for name, value in changes.items():
            if name not in TRAINING_FIELDS and self.config.get(name) != value:
                raise self.conflict(name, value, self.config.get(name))
        return self.workload.resolve("", {**self.config, **changes})

    def conflict(self, name: str, asked: Any, has: Any) -> UserError:
        """Return the error for a flag that contradicts the weights."""
        flag = name.replace("_", "-")
        return UserError(
            f"--{flag} {asked} contradicts {self.path}, which has {has!r}.",
            f"Leave --{flag} out: the model is taken from the weights.",
        )


def find_pretrained(path: Path | None, own: WorkloadEntry | None = None) -> Pretrained:
    """Return what lies at `path`: a Time-MoE folder, a checkpoint, or a folder's newest one.

    None means the newest checkpoint that `steplab train` wrote to its default folder. `own` is the
    user's own model, for a checkpoint of one.
    """
    if path is None:
        path = _default_checkpoint()
    if time_moe.is_time_moe(path):
        workload = workload_of_record("tsmoe", path, own)
        config = encode(time_moe.read_config(path))
        workload.check_weights(config, time_moe.bytes_of_weights(path), path)
        return Pretrained(path, workload, config)
    path = find_checkpoint(path)
    spec: TrainSpec = decode(TrainSpec, dict(read_progress(path).spec), f"{path}: spec")
    workload = workload_of_record(spec.workload, path, own)
    config = workload.resolve("", spec.config)  # fields of later versions too
    workload.check_weights(config, bytes_of_weights(path), path / MODEL_FILE)
    note = note_on_code(workload, spec.workload, spec.source, path)
    return Pretrained(path, workload, config, spec.size, note)


def load_pretrained(found: Pretrained, model: nn.Module, config: Mapping[str, Any]) -> None:
    """Load the weights alone, all or none, into a model of that config."""
    found.config_with(config)
    if time_moe.is_time_moe(found.path):
        _load_time_moe(found, model)
    else:
        load_weights(found.path, model)


def _load_time_moe(found: Pretrained, model: nn.Module) -> None:
    """Load a Time-MoE folder; where ranks share the model, each copies its slices of it."""
    from steplab.modules.shards import is_sharded
    from steplab.train.slices import own_slice, placed_like

    if not any(map(is_sharded, model.parameters())):
        time_moe.load_weights(found.path, model)  # type: ignore[arg-type]
        return
    whole = found.workload.open(found.config).model()
    time_moe.load_weights(found.path, whole)  # type: ignore[arg-type]
    state = whole.state_dict()
    for name, own in model.state_dict().items():
        state[name] = placed_like(state[name][own_slice(own)[0].index], own)
    model.load_state_dict(state)


def load_for_inference(
    found: Pretrained, model: nn.Module, device: str, recipe: Recipe, purpose: str
) -> ForwardContext:
    """Load the weights into a model of that config and make it ready to predict on `device`.

    Returns the context to enter around every call. `purpose` names the use in error messages.
    """
    import torch

    from steplab.step.assemble import find_device

    load_pretrained(found, model, found.config)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(find_device(device)).eval()
    return apply_inference_recipe(recipe, model, purpose)


def apply_inference_recipe(recipe: Recipe, model: nn.Module, purpose: str) -> ForwardContext:
    """Apply the techniques that change how a model predicts; refuse the others."""
    import torch

    from steplab.techniques.recipes import check_recipe, technique
    from steplab.techniques.technique import Stage, StepParts

    check_recipe(recipe)
    device = next(model.parameters()).device
    parts = StepParts(model, device, torch.amp.GradScaler(device.type, enabled=False))
    for name, settings in recipe.techniques.items():
        if technique(name).stage not in (Stage.IMPLEMENTATION, Stage.PRECISION):
            raise UserError(
                f"A recipe for {purpose} cannot have {name}: the step of decoding is captured by "
                "itself, all else has any length, and nothing is trained.",
                "Use precision and impl, as in precision=bf16.",
            )
        technique(name).apply(parts, settings)
    return parts.forward_context


def _default_checkpoint() -> Path:
    folder = Path(TrainSettings().checkpoint_dir)
    found = newest_checkpoint(folder)
    if found is None:
        raise UserError(
            f"There is no checkpoint in {folder}.", "Make one with `steplab train`, or name one."
        )
    return found


@dataclass(frozen=True)
class Exported:
    """What an export has written."""

    source: Path  # the checkpoint
    folder: Path
    tensors: int
    size: int  # bytes of the tensor file


def export_time_moe(path: Path, folder: Path) -> Exported:
    """Write the weights of the checkpoint `path` into a new `folder`, bit for bit, as fp32.

    The folder is complete or absent. A model that Time-MoE cannot express is refused.
    """
    path = find_checkpoint(path)
    spec: TrainSpec = decode(
        TrainSpec,
        dict(read_verified_manifest(path).progress.spec),
        f"{path / 'checkpoint.json'}: spec",
    )
    if spec.workload != "tsmoe":
        raise UserError(
            f"{path} is a model of {spec.workload}, and only tsmoe can become Time-MoE."
        )
    config: TsmoeConfig = decode(TsmoeConfig, dict(spec.config), f"{path}: config")
    text = render_config(config)
    if folder.exists():
        raise UserError(f"{folder} exists already.", "Name a folder that does not.")
    with disk_errors(folder.parent, "--out"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        return _write_time_moe(path, config, text, folder)


def _write_time_moe(path: Path, config: TsmoeConfig, text: bytes, folder: Path) -> Exported:
    from steplab.train.tensor_files import write_tensors

    slices = parameter_slices(config)
    with open_weights(path) as saved:
        whole = {name: saved.read(name) for name in sorted({p.parameter for p in slices.values()})}
    tensors = {name: whole[part.parameter][part.at] for name, part in slices.items()}
    draft = new_draft(folder.parent)
    try:
        checksum = write_tensors(draft / SINGLE_FILE, tensors)
        write_file(draft / CONFIG_FILE, text)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    sync_folder(folder.parent)
    return Exported(path, folder, len(tensors), checksum.size)
