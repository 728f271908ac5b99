"""A trained model from a folder: a steplab checkpoint, or one in the layout of Time-MoE."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from steplab.core import Recipe
from steplab.core.errors import UserError
from steplab.core.spec import TrainSettings
from steplab.step.assemble import find_device
from steplab.techniques.recipes import check_recipe, technique
from steplab.techniques.technique import Stage, StepParts
from steplab.train.checkpoint import newest_checkpoint
from steplab.train.pretrained import find_pretrained, load_pretrained
from steplab.workloads.tsmoe.model import Tsmoe
from steplab.workloads.workload import find_workload

ForwardContext = Callable[[], contextlib.AbstractContextManager[Any]]


class LoadedModel(NamedTuple):
    """A model, ready to forecast."""

    name: str  # the folder it came from
    model: Tsmoe
    forward_context: ForwardContext  # to be entered around every call: autocast, where asked for


def load_model(path: Path | None, device: str, recipe: Recipe) -> LoadedModel:
    """Load the checkpoint `path`, the newest in that folder, or of the default folder."""
    origin = find_pretrained(default_checkpoint() if path is None else path)
    model = find_workload(origin.workload).open(origin.config).model()
    if not isinstance(model, Tsmoe):
        raise UserError(
            f"{origin.path} is a model of {origin.workload}, which forecasts no series."
        )
    load_pretrained(origin.path, model, origin.config)
    model = model.to(_device(device)).eval()
    return LoadedModel(str(origin.path), model, apply_recipe(recipe, model))


def default_checkpoint() -> Path:
    """Return the newest checkpoint that `steplab train` wrote to its default folder."""
    folder = Path(TrainSettings().checkpoint_dir)
    found = newest_checkpoint(folder)
    if found is None:
        raise UserError(
            f"There is no checkpoint in {folder}.", "Make one by `steplab train`, or name one."
        )
    return found


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return find_device(name)


def apply_recipe(recipe: Recipe, model: nn.Module, purpose: str = "forecasts") -> ForwardContext:
    """Apply the techniques that change how a model predicts; refuse the others."""
    check_recipe(recipe)
    device = next(model.parameters()).device
    parts = StepParts(model, device, torch.amp.GradScaler(device.type, enabled=False))
    for name, settings in recipe.techniques.items():
        if technique(name).stage not in (Stage.IMPLEMENTATION, Stage.PRECISION):
            raise UserError(
                f"A recipe for {purpose} cannot have {name}: every number of cached tokens is "
                "another shape, and nothing is trained.",
                "Use precision and impl, as in precision=bf16.",
            )
        technique(name).apply(parts, settings)
    return parts.forward_context
