"""Restore: everything is checked before anything is changed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from steplab.engine.checkpoint.document import Document
from steplab.engine.checkpoint.folder import MODEL_FILE, OPTIMIZER_FILE, RNG_FILE, find
from steplab.engine.checkpoint.integrity import read_document, read_intact
from steplab.engine.checkpoint.progress import Progress
from steplab.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import nn


def read_progress(path: Path) -> Progress:
    """Return how far the checkpoint `path` (or the newest in that folder) is. Needs no torch."""
    return read_document(find(path)).progress


def restore(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> Progress:
    """Put a training back to where it was saved: weights, optimizer, scaler, random generators.

    On the same machine, with the same versions, the next step then gives the same bits as if
    there had been no break. On any error nothing has been changed.
    """
    from steplab.engine.checkpoint import generators, optimizer_state, weights
    from steplab.engine.checkpoint.tensor_file import read_tensors
    from steplab.modules.one_pass_adamw import full_weights

    path = find(path)
    document = read_intact(path)
    names, record = weights.parameter_names(model), document.optimizer
    tensors = {name: read_tensors(path / name) for name in (MODEL_FILE, OPTIMIZER_FILE, RNG_FILE)}
    moments = tensors[OPTIMIZER_FILE]
    with full_weights(optimizer):
        weights.check_weights(model, tensors[MODEL_FILE], str(path / MODEL_FILE))
        optimizer_state.check(optimizer, names, record, moments, str(path / OPTIMIZER_FILE))
        _check_scaler(scaler, document, path)
        weights.apply_weights(model, tensors[MODEL_FILE])
        optimizer_state.apply(optimizer, names, record, moments)
    scaler.load_state_dict(dict(document.scaler))
    generators.set_torch_states(tensors[RNG_FILE])
    generators.set_python_state(document.python_random)
    generators.set_numpy_state(document.numpy_random)
    return document.progress


def load_weights(path: Path, model: nn.Module) -> None:
    """Load the weights alone, all of them or, on any error, none."""
    from steplab.engine.checkpoint import weights
    from steplab.engine.checkpoint.tensor_file import read_tensors

    path = find(path)
    read_intact(path)
    saved = read_tensors(path / MODEL_FILE)
    weights.check_weights(model, saved, str(path / MODEL_FILE))
    weights.apply_weights(model, saved)


def _check_scaler(scaler: torch.amp.GradScaler, document: Document, path: Path) -> None:
    if bool(document.scaler) == scaler.is_enabled():
        return
    saved, now = ("with", "does not") if document.scaler else ("without", "does")
    raise UserError(
        f"{path} was saved {saved} gradient scaling, but this training {now} scale its gradients.",
        "Use the precision that it was trained with (fp16 is the one that scales).",
    )
