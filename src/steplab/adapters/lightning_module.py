"""A recipe in Lightning's Trainer, and the Meter as its callback.

trainer = Trainer(callbacks=[RecipeCallback("recipe.toml"), MeterCallback(tokens=count)])
trainer.fit(module, loader)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from steplab.adapters.foreign_loop import (
    changes_optimizer,
    open_step,
    read_recipe,
    refuse_ranks,
    refuse_twice,
)
from steplab.core import Recipe
from steplab.core.errors import UserError
from steplab.meter import Meter
from steplab.step.outside_calls import step_dtypes

LOOP = "Lightning"
EVALUATION = ("validation_step", "test_step", "predict_step")


class RecipeCallback(Callback):
    """Wraps `training_step` of the module that is fitted; hooks, logging and loops stay.

    Lightning calls backward, clips and updates. `compile=blocks` is what such a module can have:
    its training_step logs, and calls parts of the module by name.
    """

    def __init__(self, recipe: Recipe | str) -> None:
        self.recipe = read_recipe(recipe, LOOP)
        scope = self.recipe.techniques.get("compile", {}).get("scope", "blocks")
        if scope != "blocks":
            raise UserError(
                f"The recipe has compile={scope}, and a training_step that logs is no one graph.",
                "Use compile=blocks.",
            )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot be had; apply the recipe when Lightning asks for the optimizer.

        By then the module is on its device, and no step has been made.
        """
        if stage != "fit":
            return
        if getattr(pl_module.training_step, "has_recipe", False):
            raise UserError(
                "This module has been fitted with a recipe before, which is still in it.",
                "Fit a new module, with a new RecipeCallback.",
            )
        refuse_ranks(trainer.world_size, LOOP)
        set_there = str(trainer.precision) not in ("32-true", "32")
        refuse_twice(self.recipe, "precision", f"precision={trainer.precision}", set_there)
        if not pl_module.automatic_optimization:
            raise UserError(
                "The module optimizes by hand (automatic_optimization is False).",
                "Use steplab.optimize in its training_step.",
            )
        configure = pl_module.configure_optimizers

        def configure_optimizers() -> Any:
            made = configure()
            one = made if isinstance(made, torch.optim.Optimizer) else None
            if one is None and changes_optimizer(self.recipe):
                raise UserError(
                    "The recipe changes the optimizer, and configure_optimizers() returns a "
                    f"{type(made).__name__}, whose schedules belong to the old one.",
                    "Return one optimizer, or leave optimizer out of the recipe.",
                )
            return self._wrap(pl_module, one) or made

        pl_module.configure_optimizers = configure_optimizers

    def _wrap(
        self, module: LightningModule, optimizer: torch.optim.Optimizer | None
    ) -> torch.optim.Optimizer | None:
        """Let the module's training_step run the recipe; return an optimizer that was made anew."""
        training_step = module.training_step
        given: list[Any] = []  # what it has returned

        def loss(module: torch.nn.Module, words: tuple[Any, ...]) -> Any:
            given[:] = [training_step(*words)]
            return torch.zeros(()) if given[0] is None else given[0]  # None: Lightning skips it

        step = open_step(module, loss, self.recipe, optimizer)

        def wrapped(*words: Any) -> Any:
            value, returned = step.loss(words).loss, given.pop()
            if isinstance(returned, Mapping):  # what else is in it is for the callbacks
                return {**returned, "loss": value}
            return None if returned is None else value

        wrapped.has_recipe = True  # type: ignore[attr-defined]
        module.training_step = wrapped
        for name in EVALUATION:
            setattr(module, name, _in_step_dtypes(module, getattr(module, name)))
        return step.optimizer


def _in_step_dtypes(module: LightningModule, evaluate: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that computes as the step does; it may call parts of the module by name."""

    @wraps(evaluate)  # Lightning asks whether a method is the module's own
    def wrapped(*words: Any, **named: Any) -> Any:
        with step_dtypes(module, module.device) or nullcontext():
            return evaluate(*words, **named)

    return wrapped


class MeterCallback(Callback):
    """Logs tokens per second, MFU, data stall and memory of every batch that is trained on.

    `tokens(batch)` counts them; `options` are the Meter's. Validation, saving and the time between
    two fits are no data stall.
    """

    def __init__(self, tokens: Callable[[Any], int], every: int = 10, **options: Any) -> None:
        self.tokens = tokens
        self.every = every
        self.options = options
        self.meter: Meter | None = None
        self.scope: Any = None  # of the step that is running

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Enter a step."""
        if self.meter is None:
            self.meter = Meter(pl_module, **self.options)
        if self.scope is not None:  # a batch that was skipped, or raised, has no end
            self.scope.__exit__(StopIteration)
        self.scope = self.meter.step(self.tokens(batch))
        self.scope.__enter__()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Leave it, and log every `every` steps."""
        assert self.meter is not None
        self.scope.__exit__(None)
        self.scope = None
        if self.meter.due(self.every):
            for name, value in self.meter.metrics().items():
                pl_module.log(name, value, on_step=True, on_epoch=False)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The time since another fit is not this one's."""
        self._pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The next batch has not waited for data."""
        self._pause()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """The next batch has not waited for data."""
        self._pause()

    def _pause(self) -> None:
        if self.meter is not None:
            self.meter.pause()
