"""A recipe in a loop that uses Hugging Face's Accelerate.

step, optimizer = optimize_for(accelerator, model, loss, "recipe.toml", optimizer)
optimizer, loader = accelerator.prepare(optimizer, loader)
meter = steplab.Meter(step.model)
for batch in loader:
    with meter.step(tokens=batch.numel()), accelerator.accumulate(step.model):
        accelerator.backward(step.loss(batch).loss)
        optimizer.step()
        optimizer.zero_grad()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend
from torch import nn

from steplab.adapters.foreign_loop import open_step, read_recipe, refuse_ranks, refuse_twice
from steplab.core import Recipe
from steplab.step.step import Step

LOOP = "Accelerate"


def optimize_for(
    accelerator: Accelerator,
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Any],
    recipe: Recipe | str,
    optimizer: torch.optim.Optimizer,
) -> tuple[Step, torch.optim.Optimizer]:
    """Apply a recipe to a model and to its optimizer.

    `optimizer` holds the model's parameters and has not stepped; prepare the one that is returned,
    and make the schedule for that one. The model is prepared here, so that the accelerator saves it
    and its mixed precision reaches it: `step.model`.
    """
    read = read_recipe(recipe, LOOP)
    refuse_ranks(accelerator.num_processes, LOOP)
    mixed = accelerator.mixed_precision
    refuse_twice(read, "precision", f"mixed_precision={mixed!r}", mixed != "no")
    backend = accelerator.state.dynamo_plugin.backend
    refuse_twice(read, "compile", f"dynamo_backend={backend}", backend != DynamoBackend.NO)
    step = open_step(accelerator.prepare_model(model), loss, read, optimizer)
    return step, step.optimizer or optimizer
