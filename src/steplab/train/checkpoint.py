"""Save and restore a training: complete or absent, verified before it is loaded, never unpickled.

Importing this module leaves torch out; saving and restoring import it.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from steplab import __version__
from steplab.core.atomic import disk_errors, sync_folder, write_file
from steplab.core.errors import UserError
from steplab.core.run import now
from steplab.train.checkpoint_files import (
    CHECKPOINT_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    RNG_FILE,
    Manifest,
    TrainProgress,
    find_checkpoint,
    manifest_to_json,
    new_draft,
    next_checkpoint_path,
    prune_checkpoints,
    read_manifest,
    read_verified_manifest,
    remove_stale_drafts,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


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
    from steplab.train import checkpoint_tensors

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
    with full_weights(optimizer), disk_errors(folder, "--checkpoint-dir"):
        tensors = {
            MODEL_FILE: checkpoint_tensors.model_tensors(model),
            OPTIMIZER_FILE: moments,
            RNG_FILE: checkpoint_tensors.torch_rng_states(),
        }
        if not folder.is_dir():
            folder.mkdir(parents=True)
            sync_folder(folder.parent)
        remove_stale_drafts(folder)
        written = _write(folder, manifest, tensors)
        prune_checkpoints(folder, written, keep)
    return written


def _write(folder: Path, manifest: Manifest, tensors: dict[str, dict[str, Tensor]]) -> Path:
    """Write a draft, flushed file by file, then rename it: that makes it a checkpoint."""
    from steplab.train.checkpoint_tensors import write_tensors

    draft = new_draft(folder)
    try:
        files = {name: write_tensors(draft / name, content) for name, content in tensors.items()}
        write_file(draft / CHECKPOINT_FILE, manifest_to_json(replace(manifest, files=files)))
        final = draft.rename(next_checkpoint_path(folder, manifest.progress.step))
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    sync_folder(folder)
    return final


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
    from steplab.train import checkpoint_tensors

    path = find_checkpoint(path)
    manifest = read_verified_manifest(path)
    names, record = checkpoint_tensors.parameter_names(model), manifest.optimizer
    tensors = {
        name: checkpoint_tensors.read_tensors(path / name)
        for name in (MODEL_FILE, OPTIMIZER_FILE, RNG_FILE)
    }
    weights, moments = tensors[MODEL_FILE], tensors[OPTIMIZER_FILE]
    with full_weights(optimizer):
        checkpoint_tensors.check_weights(model, weights, str(path / MODEL_FILE))
        where = str(path / OPTIMIZER_FILE)
        checkpoint_tensors.check_optimizer(optimizer, names, record, moments, where)
        checkpoint_tensors.check_rng_states(manifest, tensors[RNG_FILE], path)
        _check_scaler(scaler, manifest, path)
        checkpoint_tensors.restore_weights(model, weights)
        checkpoint_tensors.restore_optimizer(optimizer, names, record, moments)
    scaler.load_state_dict(dict(manifest.scaler))
    checkpoint_tensors.set_torch_rng_states(tensors[RNG_FILE])
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
    read_verified_manifest(path)
    saved = checkpoint_tensors.read_tensors(path / MODEL_FILE)
    checkpoint_tensors.check_weights(model, saved, str(path / MODEL_FILE))
    checkpoint_tensors.restore_weights(model, saved)


def read_progress(path: Path) -> TrainProgress:
    """Return how far the checkpoint `path` (or the newest in that folder) is. Needs no torch."""
    return read_manifest(find_checkpoint(path)).progress
