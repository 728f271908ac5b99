"""What every adapter shares: a recipe in a loop that calls backward and the update itself.

Such a loop takes `step.loss(batch)`, and an optimizer that may be made anew. Techniques that are
about the whole step cannot be had there, and are refused before training, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from steplab.core import Recipe
from steplab.core.errors import UserError
from steplab.step.optimize import optimize
from steplab.step.state_dicts import PLAIN_UPDATE
from steplab.step.step import Step
from steplab.techniques.precision import WITH_BF16_WEIGHTS
from steplab.techniques.recipes import parse_recipe

WHOLE_STEP = {
    "cuda_graph": "captures backward and update too, which {loop} calls by itself",
    "parallel": "shares the step between ranks, which {loop} does by itself",
    "prefetch": "fetches batches ahead, and the loader belongs to {loop}",
}
FP16 = "scales gradients, which {loop} does by itself"


def read_recipe(recipe: Recipe | str, loop: str) -> Recipe:
    """Return a recipe that a foreign loop can run; `loop` is what people call it."""
    read = parse_recipe(recipe) if isinstance(recipe, str) else recipe
    for name, reason in WHOLE_STEP.items():
        if name in read.techniques:
            raise UserError(
                f"The recipe has {name}, which {reason.format(loop=loop)}.",
                f"Leave {name} out of the recipe.",
            )
    if read.techniques.get("precision", {}).get("dtype") == "fp16":
        raise UserError(
            f"The recipe has precision=fp16, which {FP16.format(loop=loop)}.",
            "Use precision=bf16, or leave it out and set fp16 there.",
        )
    return read


def refuse_twice(recipe: Recipe, technique: str, setting: str, is_set: bool) -> None:
    """Refuse what recipe and loop both decide: one would hide the other."""
    if is_set and technique in recipe.techniques:
        raise UserError(
            f"The recipe has {technique}, and {setting} is set too.", f"Leave {setting} out."
        )


def refuse_ranks(count: int, loop: str) -> None:
    """Refuse several processes: a recipe is applied to the model of one."""
    if count > 1:
        raise UserError(
            f"{loop} runs on {count} processes, and its recipe is for one.",
            "Train on one device, or without the recipe.",
        )


def changes_optimizer(recipe: Recipe) -> bool:
    """Whether a recipe needs an optimizer of its own making."""
    weights = recipe.techniques.get("precision", {}).get("dtype") in WITH_BF16_WEIGHTS
    compiled = bool(recipe.techniques.get("compile", {}).get("optimizer"))
    return "optimizer" in recipe.techniques or weights or compiled


def open_step(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Any],
    recipe: Recipe,
    optimizer: torch.optim.Optimizer | None,
) -> Step:
    """Apply the recipe to the model in place; the loop takes `step.loss(batch)`.

    Where the recipe is about updates, `step.optimizer` is made anew from `optimizer`, which must
    not have stepped yet; else it is None, and the loop keeps its own.
    """
    if optimizer is None or not changes_optimizer(recipe):
        return optimize(model, loss, recipe, mode="forward+backward")
    _refuse_in_use(optimizer)
    return optimize(model, loss, recipe, lambda model, **how: _remade(optimizer, **how))


def _refuse_in_use(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer to which something is bound that a new one would not have."""
    bound = {
        "a schedule was made for the old one": any(
            "initial_lr" in group for group in optimizer.param_groups
        ),
        "the old one has taken steps or was loaded": bool(optimizer.state),
    }
    for what, is_bound in bound.items():
        if is_bound:
            raise UserError(
                f"The recipe makes the optimizer anew, and {what}.",
                "Apply the recipe first, then schedule or load the optimizer that it made.",
            )


def _remade(optimizer: torch.optim.Optimizer, **implementation: bool) -> torch.optim.Optimizer:
    """Return an optimizer of the same kind and options, computed as the recipe asks."""
    groups = [
        {key: value for key, value in group.items() if key not in PLAIN_UPDATE}
        for group in optimizer.param_groups
    ]
    kind: Any = type(optimizer)
    made: torch.optim.Optimizer = kind(groups, **implementation)
    return made
