"""Save: a draft, flushed file by file, then one rename."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from steplab import __version__
from steplab.engine.checkpoint.document import Document, render
from steplab.engine.checkpoint.folder import (
    CHECKPOINT_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    RNG_FILE,
    free_name,
    new_draft,
    prune,
    sweep_drafts,
)
from steplab.engine.checkpoint.progress import Progress
from steplab.errors import UserError
from steplab.record.run import now
from steplab.store.atomic import disk_errors, sync_folder, write_file

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

FOLDER_FLAG = "--checkpoint-dir"


def save(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    progress: Progress,
    keep: int,
) -> Path:
    """Write a checkpoint into `folder`, then remove all but the `keep` newest (0: all stay).

    Call it between steps. When it fails, or the process is killed, the older checkpoints are all
    there and nothing of the new one is visible.
    """
    import torch

    from steplab.engine.checkpoint import generators, optimizer_state, weights
    from steplab.modules.one_pass_adamw import full_weights

    if keep < 0:
        raise UserError(f"{keep} checkpoints cannot be kept.", "Use 0 to keep all of them.")
    names = weights.parameter_names(model)
    record, moments = optimizer_state.capture(optimizer, names)
    document = Document(
        replace(progress, steplab=__version__, torch=str(torch.__version__), created=now()),
        record,
        scaler.state_dict(),
        generators.python_state(),
        generators.numpy_state(),
        files={},
    )
    with full_weights(optimizer), disk_errors(folder, FOLDER_FLAG):
        tensors = {
            MODEL_FILE: weights.model_tensors(model),
            OPTIMIZER_FILE: moments,
            RNG_FILE: generators.torch_states(),
        }
        _make(folder)
        sweep_drafts(folder)
        written = _write(folder, document, tensors)
        prune(folder, written, keep)
    return written


def _make(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True)
        sync_folder(folder.parent)


def _write(folder: Path, document: Document, tensors: dict[str, dict[str, Tensor]]) -> Path:
    from steplab.engine.checkpoint.tensor_file import write_tensors

    draft = new_draft(folder)
    try:
        seals = {name: write_tensors(draft / name, content) for name, content in tensors.items()}
        write_file(draft / CHECKPOINT_FILE, render(replace(document, files=seals)))
        final = draft.rename(free_name(folder, document.progress.step))
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    sync_folder(folder)
    return final
