"""A trained model from a folder: a steplab checkpoint, or one in the layout of Time-MoE."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from steplab.core import Recipe
from steplab.core.errors import UserError
from steplab.train.pretrained import ForwardContext, find_pretrained, load_for_inference
from steplab.workloads.tsmoe.model import Tsmoe
from steplab.workloads.workload import find_workload


class LoadedModel(NamedTuple):
    """A model, ready to forecast."""

    name: str  # the folder it came from
    model: Tsmoe
    forward_context: ForwardContext  # to be entered around every call: autocast, where asked for


def load_model(path: Path | None, device: str, recipe: Recipe) -> LoadedModel:
    """Load the checkpoint `path` or the newest in that folder; None means the default folder."""
    found = find_pretrained(path)
    model = find_workload(found.workload).open(found.config).model()
    if not isinstance(model, Tsmoe):
        raise UserError(f"{found.path} is a model of {found.workload}, which forecasts no series.")
    context = load_for_inference(found, model, device, recipe, "forecasts")
    return LoadedModel(str(found.path), model, context)
