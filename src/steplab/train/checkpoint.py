"""Save and restore a training: complete or absent, verified before it is loaded, never unpickled.

Importing this module leaves torch out; saving and restoring import it.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from steplab import __version__
from steplab.core.atomic import disk_errors
from steplab.core.errors import UserError
from steplab.core.run import now
from steplab.train.checkpoint_files import (
    CHECKPOINT_FILE,
    MODEL,
    MODEL_FILE,
    OPTIMIZER,
    OPTIMIZER_FILE,
    RNG_FILE,
    Manifest,
    TrainProgress,
    find_checkpoint,
    open_draft,
    publish_draft,
    read_manifest,
    read_verified_manifest,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from steplab.train.tensor_files import SavedTensors


def save_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    progress: TrainProgress,
    keep: int,
) -> Path:
    """Write a checkpoint into `folder`, then remove all but the `keep` newest (0 keeps all).

    Call it between steps. If it fails, or the process is killed, the older checkpoints are all
    there and nothing of the new one is visible.
    """
    import torch

    from steplab.modules.optimizer import full_weights
    from steplab.modules.shards import local
    from steplab.parallel.world import current_world
    from steplab.train import checkpoint_tensors
    from steplab.train.shared_save import SharedSave
    from steplab.train.tensor_files import write_tensors

    if keep < 0:
        raise UserError(f"{keep} checkpoints cannot be kept.", "Use 0 to keep all of them.")
    names = checkpoint_tensors.parameter_names(model)
    record, moments = checkpoint_tensors.capture_optimizer(optimizer, names)
    manifest = Manifest(
        replace(progress, steplab=__version__, torch=str(torch.__version__), created=now()),
        record,
        scaler.state_dict(),
        checkpoint_tensors.python_rng_state(),
        checkpoint_tensors.numpy_rng_state(),
        files={},
    )
    with full_weights(optimizer):
        weights = checkpoint_tensors.model_tensors(model)
        rng = checkpoint_tensors.torch_rng_states()
        if current_world().size > 1:
            return SharedSave(folder, manifest, weights, moments, rng, keep).run()
        tensors = {MODEL_FILE: weights, OPTIMIZER_FILE: moments, RNG_FILE: rng}
        with disk_errors(folder, "--checkpoint-dir"):
            draft = open_draft(folder)
            try:
                files = {
                    # `local`: the shards of a group of one are the whole tensors.
                    name: write_tensors(draft / name, {k: local(v) for k, v in each.items()})
                    for name, each in tensors.items()
                }
                return publish_draft(draft, replace(manifest, files=files), keep)
            finally:
                shutil.rmtree(draft, ignore_errors=True)


def restore_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> TrainProgress:
    """Restore weights, optimizer, scaler and random generators from the checkpoint `path`.

    Everything is checked before anything is changed. On the same machine, with the same versions,
    the next step gives the same bits as if there had been no break.
    """
    from steplab.modules.optimizer import full_weights
    from steplab.parallel.world import current_world
    from steplab.train import checkpoint_tensors

    world, path = current_world(), find_checkpoint(path)
    manifest = read_verified_manifest(path, world.rank, world.size)
    names, record = checkpoint_tensors.parameter_names(model), manifest.optimizer
    with (
        full_weights(optimizer),
        _open(path, manifest.files_of(MODEL)) as weights,
        _open(path, manifest.files_of(OPTIMIZER)) as moments,
        _open(path, [RNG_FILE]) as rng,
    ):
        checkpoint_tensors.check_weights(model, weights, str(path / MODEL_FILE))
        where = str(path / OPTIMIZER_FILE)
        checkpoint_tensors.check_optimizer(optimizer, names, record, moments, where)
        states = {name: rng.read(name) for name in rng.shapes}
        checkpoint_tensors.check_rng_states(manifest, states, path)
        _check_scaler(scaler, manifest, path)
        checkpoint_tensors.restore_weights(model, weights)
        checkpoint_tensors.restore_optimizer(optimizer, names, record, moments)
        checkpoint_tensors.set_torch_rng_states(states)
    scaler.load_state_dict(dict(manifest.scaler))
    checkpoint_tensors.set_python_rng_state(manifest.python_random)
    checkpoint_tensors.set_numpy_rng_state(manifest.numpy_random)
    return manifest.progress


def _check_scaler(scaler: torch.amp.GradScaler, manifest: Manifest, path: Path) -> None:
    if bool(manifest.scaler) == scaler.is_enabled():
        if manifest.scaler.keys() != scaler.state_dict().keys():
            raise UserError(
                f"{path / CHECKPOINT_FILE} is damaged: the scaler's state is not whole."
            )
        return
    saved, own = ("with", "does not") if manifest.scaler else ("without", "does")
    raise UserError(
        f"{path} was saved {saved} gradient scaling, but this training {own} scale its gradients.",
        "Use the precision that it was trained with (fp16 is the one that scales).",
    )


def load_weights(path: Path, model: nn.Module) -> None:
    """Load the weights alone: all of them or, on any error, none."""
    from steplab.train import checkpoint_tensors

    path = find_checkpoint(path)
    with open_weights(path) as saved:
        checkpoint_tensors.check_weights(model, saved, str(path / MODEL_FILE))
        checkpoint_tensors.restore_weights(model, saved)


def open_weights(path: Path) -> SavedTensors:
    """Return the model's tensors in the checkpoint `path`, verified."""
    return _open(path, read_verified_manifest(path).files_of(MODEL))


def _open(path: Path, names: Sequence[str]) -> SavedTensors:
    from steplab.train.tensor_files import SavedTensors

    return SavedTensors([path / name for name in names])


def read_progress(path: Path) -> TrainProgress:
    """Return how far the checkpoint `path` (or the newest in that folder) is. Needs no torch."""
    return read_manifest(find_checkpoint(path)).progress
