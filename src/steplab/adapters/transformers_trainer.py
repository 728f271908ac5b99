"""A recipe in Hugging Face's Trainer, and the Meter as its callback.

class MyTrainer(RecipeMixin, Trainer):
    recipe = "recipe.toml"  # as `steplab tune` wrote it, or words

MyTrainer(model, args, train_dataset=data, callbacks=[MeterCallback(tokens_per_step)]).train()
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from steplab.adapters.foreign_loop import (
    open_step,
    read_recipe,
    refuse_ranks,
    refuse_twice,
)
from steplab.core import Recipe
from steplab.meter import Meter
from steplab.step.step import Step

LOOP = "the Trainer"


class RecipeMixin:
    """Comes before Trainer among the bases. Evaluation, checkpoints and schedules stay as they are.

    The loss of a training step is `step.loss`; backward, clipping and update are the Trainer's.
    """

    recipe: ClassVar[Recipe | str] = "plain"
    step: Step | None = None

    def create_optimizer(self: Any, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the Trainer's optimizer, and the recipe's out of it where that is about updates."""
        made = super().create_optimizer(model)  # type: ignore[misc]
        if self.step is not None:  # trained a second time
            return made
        recipe, args = read_recipe(self.recipe, LOOP), self.args
        refuse_ranks(max(args.world_size, args.n_gpu), LOOP)
        refuse_twice(recipe, "precision", "bf16 or fp16", args.bf16 or args.fp16)
        refuse_twice(recipe, "compile", "torch_compile", args.torch_compile)
        refuse_twice(recipe, "checkpointing", "gradient_checkpointing", args.gradient_checkpointing)
        self.step = open_step(self.model, self._recipe_loss(), recipe, made)
        self.optimizer = self.step.optimizer or made
        return self.optimizer

    def compute_loss(
        self: Any,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the loss under the recipe where it is trained, as the Trainer does elsewhere."""
        if return_outputs or not model.training or self.step is None:
            return super().compute_loss(  # type: ignore[misc]
                model, inputs, return_outputs, num_items_in_batch=num_items_in_batch
            )
        items = {}
        if num_items_in_batch is not None:  # a tensor: code would be compiled for every number
            items["num_items_in_batch"] = torch.as_tensor(num_items_in_batch)
        return self.step.loss({"inputs": dict(inputs), **items}).loss

    def _recipe_loss(self: Any) -> Any:
        """Return loss(model, batch): the model's own where the Trainer would take that.

        A plain function of the model, because `compile=loss` cannot look into a Trainer.
        """
        is_own = super().compute_loss.__func__ is Trainer.compute_loss  # type: ignore[misc]
        if is_own and self.label_smoother is None and self.compute_loss_func is None:
            takes_items = self.model_accepts_loss_kwargs

            def models_loss(model: nn.Module, batch: dict[str, Any]) -> Any:
                items = {k: v for k, v in batch.items() if k != "inputs" and takes_items}
                output = model(**batch["inputs"], **items)
                return output["loss"] if isinstance(output, dict) else output[0]

            return models_loss
        compute_loss = super().compute_loss  # type: ignore[misc]

        def trainers_loss(model: nn.Module, batch: dict[str, Any]) -> Any:
            items = {key: value for key, value in batch.items() if key != "inputs"}
            return compute_loss(model, dict(batch["inputs"]), **items)

        return trainers_loss


class MeterCallback(TrainerCallback):
    """Tells tokens per second, MFU, data stall and memory whenever the Trainer logs.

    `tokens_per_step` are those of all micro-batches of an update; `options` are the Meter's, among
    them `jsonl` and `tensorboard`, since the Trainer's own reporters have been called by then.
    """

    def __init__(self, tokens_per_step: int, **options: Any) -> None:
        self.tokens_per_step = tokens_per_step
        self.options = options
        self.meter: Meter | None = None
        self.scope: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begin with the model that is trained."""
        self.meter = Meter(given["model"], **self.options)

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Enter a step, before its first micro-batch."""
        assert self.meter is not None
        self.scope = self.meter.step(self.tokens_per_step)
        self.scope.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Leave it, after the update."""
        self.scope.__exit__(None)

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The next step has not waited for data."""
        self._pause()

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The next step has not waited for data."""
        self._pause()

    def _pause(self) -> None:
        if self.meter is not None:  # evaluated without training
            self.meter.pause()

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Print the Meter's line where the Trainer logs, and add its numbers to the history."""
        assert self.meter is not None
        if state.global_step:
            print(self.meter.log())
            state.log_history[-1].update(self.meter.metrics())
