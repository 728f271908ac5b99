"""`steplab.apply(recipe, model, loss)`: a recipe for people who have a loop of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from steplab.core import MODES, Mode, Recipe
from steplab.core.errors import UserError
from steplab.step.assemble import build_step
from steplab.step.step import Step
from steplab.techniques.recipes import check_recipe, parse_recipe
from steplab.workloads.user_model import UserModel, UserWorkload
from steplab.workloads.workload import StepOutput

Loss = Callable[[nn.Module, Any], Tensor | StepOutput]


def apply(
    recipe: Recipe | str,
    model: nn.Module,
    loss: Loss,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    *,
    clip: float = 0.0,
    mode: Mode = "full",
) -> Step:
    """Apply a recipe to a model in place; return the step that runs it.

        step = steplab.apply("precision=bf16,compile=blocks,optimizer=fused", model, loss)
        for batch in loader:
            output = step([batch])  # one or more micro-batches; loss and metrics on the device

    `recipe` is a Recipe, a preset's name, words or a file, as for `--recipe`. `loss(model, batch)`
    returns a scalar tensor, or a StepOutput with metrics. `optimizer(model, **implementation)`
    makes the optimizer, and passes on `foreach=` or `fused=` where the recipe asks for it; without
    one it is AdamW with torch's defaults. Schedules find it in `step.optimizer`. Batches are yours
    and must be on the model's device. Gradients are clipped to the norm `clip`; 0 leaves them
    alone. The precision of fp32 matrix products, a global setting of torch, is set as the recipe
    asks.
    """
    _check_kinds(recipe, model, optimizer)
    if isinstance(recipe, str):
        recipe = parse_recipe(recipe)
    else:
        check_recipe(recipe)
    if mode not in MODES:
        raise UserError(f"mode is {mode!r}.", f"Known: {', '.join(MODES)}.")
    first = next(model.parameters(), None)
    if first is None:
        raise UserError("The model has no parameters, so its device is unknown.")
    user_model = UserModel(model, _no_batches, loss, optimizer=optimizer)
    workload = UserWorkload(lambda: user_model, {}, "the model given to apply")
    workload.built = user_model
    return build_step(workload, model, first.device, recipe, mode, clip)


def _check_kinds(recipe: Any, model: Any, optimizer: Any) -> None:
    """Refuse what is easily passed by mistake, before the lack of an attribute shows it."""
    if not isinstance(recipe, (str, Recipe)):
        raise UserError(
            f"The recipe is of type {type(recipe).__name__}.",
            'Give words, as in "precision=bf16", a preset\'s name, a file or a steplab Recipe.',
        )
    if not isinstance(model, nn.Module):
        raise UserError(f"The model is of type {type(model).__name__}, not an nn.Module.")
    if isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            "The optimizer is made by a function, so that the recipe can ask for fused=True.",
            "As in: lambda model, **how: torch.optim.AdamW(model.parameters(), **how)",
        )


def _no_batches(size: int) -> Iterable[Any]:
    raise UserError("This step has no batches of its own.", "Call it with yours: step([batch]).")
