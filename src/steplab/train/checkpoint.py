"""Save and restore a training: complete or absent, checked before it is loaded, never unpickled.

Importing this module leaves torch out; saving and restoring bring it in.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from steplab import __version__
from steplab.core.errors import UserError
from steplab.core.run import now
from steplab.store.atomic import disk_errors, sync_folder, write_file
from steplab.train.checkpoint_folder import (
    CHECKPOINT_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    RNG_FILE,
    find_checkpoint,
    lock_checkpoint_folder,
    new_draft,
    newest_checkpoint,
    next_checkpoint_path,
    prune_checkpoints,
    remove_stale_drafts,
)
from steplab.train.manifest import (
    Manifest,
    TrainProgress,
    manifest_to_json,
    read_manifest,
    read_verified_manifest,
)

__all__ = [
    "TrainProgress",
    "find_checkpoint",
    "load_weights",
    "lock_checkpoint_folder",
    "newest_checkpoint",
    "read_progress",
    "restore_checkpoint",
    "save_checkpoint",
]


if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

FOLDER_FLAG = "--checkpoint-dir"


def save_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    progress: TrainProgress,
    keep: int,
) -> Path:
    """Write a checkpoint into `folder`, then remove all but the `keep` newest (0: all stay).

    Call it between steps. When it fails, or the process is killed, the older checkpoints are all
    there and nothing of the new one is visible.
    """
    import torch

    from steplab.modules.optimizer import full_weights
    from steplab.train import training_state

    if keep < 0:
        raise UserError(f"{keep} checkpoints cannot be kept.", "Use 0 to keep all of them.")
    names = training_state.parameter_names(model)
    record, moments = training_state.capture_optimizer(optimizer, names)
    document = Manifest(
        replace(progress, steplab=__version__, torch=str(torch.__version__), created=now()),
        record,
        scaler.state_dict(),
        training_state.python_rng_state(),
        training_state.numpy_rng_state(),
        files={},
    )
    with full_weights(optimizer), disk_errors(folder, FOLDER_FLAG):
        tensors = {
            MODEL_FILE: training_state.model_tensors(model),
            OPTIMIZER_FILE: moments,
            RNG_FILE: training_state.torch_rng_states(),
        }
        _make(folder)
        remove_stale_drafts(folder)
        written = _write_checkpoint(folder, document, tensors)
        prune_checkpoints(folder, written, keep)
    return written


def _make(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True)
        sync_folder(folder.parent)


def _write_checkpoint(
    folder: Path, document: Manifest, tensors: dict[str, dict[str, Tensor]]
) -> Path:
    from steplab.train.tensor_file import write_tensors

    draft = new_draft(folder)
    try:
        seals = {name: write_tensors(draft / name, content) for name, content in tensors.items()}
        write_file(draft / CHECKPOINT_FILE, manifest_to_json(replace(document, files=seals)))
        final = draft.rename(next_checkpoint_path(folder, document.progress.step))
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    sync_folder(folder)
    return final


if TYPE_CHECKING:
    import torch
    from torch import nn


def read_progress(path: Path) -> TrainProgress:
    """Return how far the checkpoint `path` (or the newest in that folder) is. Needs no torch."""
    return read_manifest(find_checkpoint(path)).progress


def restore_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> TrainProgress:
    """Put a training back to where it was saved: weights, optimizer, scaler, random generators.

    On the same machine, with the same versions, the next step then gives the same bits as if
    there had been no break. On any error nothing has been changed.
    """
    from steplab.modules.optimizer import full_weights
    from steplab.train import training_state
    from steplab.train.tensor_file import read_tensors

    path = find_checkpoint(path)
    document = read_verified_manifest(path)
    names, record = training_state.parameter_names(model), document.optimizer
    tensors = {name: read_tensors(path / name) for name in (MODEL_FILE, OPTIMIZER_FILE, RNG_FILE)}
    moments = tensors[OPTIMIZER_FILE]
    with full_weights(optimizer):
        training_state.check_weights(model, tensors[MODEL_FILE], str(path / MODEL_FILE))
        training_state.check_optimizer(
            optimizer, names, record, moments, str(path / OPTIMIZER_FILE)
        )
        _check_scaler(scaler, document, path)
        training_state.restore_weights(model, tensors[MODEL_FILE])
        training_state.restore_optimizer(optimizer, names, record, moments)
    scaler.load_state_dict(dict(document.scaler))
    training_state.set_torch_rng_states(tensors[RNG_FILE])
    training_state.set_python_rng_state(document.python_random)
    training_state.set_numpy_rng_state(document.numpy_random)
    return document.progress


def load_weights(path: Path, model: nn.Module) -> None:
    """Load the weights alone, all of them or, on any error, none."""
    from steplab.train import training_state
    from steplab.train.tensor_file import read_tensors

    path = find_checkpoint(path)
    read_verified_manifest(path)
    saved = read_tensors(path / MODEL_FILE)
    training_state.check_weights(model, saved, str(path / MODEL_FILE))
    training_state.restore_weights(model, saved)


def _check_scaler(scaler: torch.amp.GradScaler, document: Manifest, path: Path) -> None:
    if bool(document.scaler) == scaler.is_enabled():
        return
    saved, now = ("with", "does not") if document.scaler else ("without", "does")
    raise UserError(
        f"{path} was saved {saved} gradient scaling, but this training {now} scale its gradients.",
        "Use the precision that it was trained with (fp16 is the one that scales).",
    )
