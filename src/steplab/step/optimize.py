"""`steplab.optimize(model, loss, recipe)`: a tuned step for people who have a loop of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule

from steplab.core import MODES, Mode, Recipe
from steplab.core.errors import UserError
from steplab.step.assemble import build_step
from steplab.step.outside_calls import widen_outside_calls
from steplab.step.state_dicts import is_rounded, keep_state_dicts
from steplab.step.step import Step
from steplab.step.usual_shapes import UsualShapes
from steplab.techniques.recipes import check_recipe, parse_recipe
from steplab.workloads.user_model import UserModel, UserWorkload


def optimize(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Any],
    recipe: Recipe | str,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    *,
    clip: float = 0.0,
    mode: Mode = "full",
) -> Step:
    """Apply a recipe to a model in place; return the step that runs it.

        step = steplab.optimize(model, loss, "precision=bf16,compile=blocks,optimizer=fused")
        for batch in step.batches(loader):
            output = step([batch])  # one or more micro-batches; loss and metrics on the device

    `recipe` is a Recipe, a preset's name, words or a file, as for `--recipe`. `loss(model, batch)`
    returns a scalar tensor, a StepOutput with metrics, or what has a `.loss` or a ["loss"], as
    Hugging Face models return. `optimizer(model, **implementation)` makes the optimizer, and passes
    on `foreach=` or `fused=` where the recipe asks for it; without one it is AdamW with torch's
    defaults. Batches are yours: `step.batches(loader)` brings them to the model's device, ahead of
    the step where the recipe has `prefetch`; without that, bring them there yourself if you like.
    Gradients are clipped to the norm `clip`; 0 leaves them alone. The precision of fp32 matrix
    products, a global setting of torch, is set as the recipe asks.

    Schedules change `step.optimizer.param_groups`, by schedulers of torch or by hand; gradients can
    be read until the next step; batches of an unusual shape run op by op; state dicts of the model
    and of `step.optimizer` are as without the recipe. What would silently not happen, such as a
    hook in a CUDA graph, is refused with what to leave out.
    """
    if isinstance(recipe, str):
        recipe = parse_recipe(recipe)
    elif isinstance(recipe, Recipe):
        check_recipe(recipe)
    else:
        raise UserError(
            f"The recipe is of type {type(recipe).__name__}, not words, a preset or a Recipe.",
            'Write steplab.optimize(model, loss, "precision=bf16").',
        )
    if mode not in MODES:
        raise UserError(f"mode is {mode!r}.", f"Known: {', '.join(MODES)}.")
    if clip < 0:
        raise UserError(f"clip is {clip:g}.", "Give a norm, or 0 to leave gradients alone.")
    _check_model(model)
    user_model = UserModel(model, _no_batches, loss, optimizer=optimizer)
    workload = UserWorkload(lambda: user_model, {}, "steplab.optimize")
    workload.take(user_model)
    first = next(model.parameters(), None)
    if first is None:
        raise UserError("The model has no parameters, so its device is unknown.")
    step = build_step(workload, model, first.device, recipe, mode, clip)
    step.keeps_gradients = True
    step.awaits_batches = step.parts.batches_ahead > 0
    _fit_into_loop(step)
    if step.graph is not None:
        step.graph.usual = UsualShapes()
    if step.parts.is_compiled:
        step.compiled_shapes = UsualShapes()
    return step


def _check_model(model: nn.Module) -> None:
    """Refuse a model that is not as it was written."""
    if isinstance(model, OptimizedModule) or getattr(model, "_compiled_call_impl", None):
        raise UserError(
            "The model is compiled already.",
            "Leave your torch.compile out: compile=loss in the recipe compiles it with its loss.",
        )
    if isinstance(model, nn.Module) and is_rounded(model):
        raise UserError(
            "An earlier steplab.optimize keeps this model's weights in 16 bits.",
            "Make the model anew, and load its state_dict().",
        )


def _fit_into_loop(step: Step) -> None:
    """Let a loop call, save and load the model as without the recipe, and update it once a step."""
    if step.parts.master_weights:
        widen_outside_calls(step.model, step.parts.device)
    if step.optimizer is not None:
        keep_state_dicts(step.model, step.optimizer)
        _refuse_second_update(step, step.optimizer)


def _refuse_second_update(step: Step, optimizer: torch.optim.Optimizer) -> None:
    """Refuse the update that a loop still has from before: it would be one more, in silence."""
    update = optimizer.step

    def step_once(this: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if step.has_updated:
            raise UserError(
                "step([batch]) has updated the weights already.",
                "Leave optimizer.step() out of the loop, or run backward yourself: "
                "step.loss(batch).loss.backward().",
            )
        return update(*args, **kwargs)

    # A method, not a function: torch's schedulers look for its __func__.
    optimizer.step = MethodType(step_once, optimizer)  # type: ignore[method-assign]


def _no_batches(size: int) -> Iterable[Any]:
    raise UserError("This step has no batches of its own.", "Call it with yours: step([batch]).")
