"""State dicts in a loop of one's own: as without the recipe, so that checkpoints fit either way.

A recipe may keep weights in 16 bits beside fp32 ones, and set how the optimizer's update runs. What
`model.state_dict()` and `optimizer.state_dict()` return has the fp32 weights under their own names
and torch's defaults for the update; what is loaded leaves the recipe's choices as they are.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from steplab.core.errors import UserError
from steplab.modules.optimizer import MASTER, full_weights, has_rounded_weights

# Options of torch's optimizers that say how an update runs and not what it computes.
PLAIN_UPDATE = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}


def keep_state_dicts(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let both give and take state dicts that do not know of the recipe.

    Parts of the model too: people save an encoder, or load one.
    """
    optimizer.register_state_dict_post_hook(_without_recipe)
    optimizer.register_load_state_dict_pre_hook(_with_recipe)
    weights = _WholeWeights(optimizer)
    widen, round_again = _Hook(weights, opens=True), _Hook(weights, opens=False)
    for module in model.modules():
        module.register_state_dict_pre_hook(widen)
        module.register_state_dict_post_hook(round_again)
        module.register_load_state_dict_pre_hook(widen)
        module.register_load_state_dict_post_hook(round_again)


def is_rounded(model: nn.Module) -> bool:
    """Whether an optimizer keeps weights of which this model's parameters are 16-bit copies."""
    hooks = (hook for hook in model._state_dict_pre_hooks.values() if isinstance(hook, _Hook))
    return any(has_rounded_weights(hook.weights.optimizer) for hook in hooks)


class _WholeWeights:
    """Lets parameters be fp32 while the state dict of a module is made or loaded."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.optimizer = optimizer
        self.depth = 0  # of modules: their hooks are called inside those of the module around them
        self.whole = ExitStack()

    def open(self) -> None:
        if not self.depth:
            self.whole.enter_context(full_weights(self.optimizer))
        self.depth += 1

    def close(self) -> None:
        self.depth -= 1
        if not self.depth:
            self.whole.close()

    def __getstate__(self) -> dict[str, Any]:
        """Leave a copy of the model, or what is unpickled, without the optimizer.

        The parameters themselves are copied as they are: as 16 bits they would be saved for good.
        """
        if has_rounded_weights(self.optimizer):
            raise UserError(
                "The model's weights are in 16 bits here, and a copy of it would have no others.",
                "Copy or save it inside with step.full_weights(), or save model.state_dict().",
            )
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.optimizer, self.depth, self.whole = None, 0, ExitStack()


@dataclass(eq=False)
class _Hook:
    """What a module calls; torch marks hooks by an attribute, which a method cannot have."""

    weights: _WholeWeights
    opens: bool

    def __call__(self, *_: Any) -> None:
        if self.opens:
            self.weights.open()
        else:
            self.weights.close()


def _without_recipe(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    groups = [
        {key: PLAIN_UPDATE.get(key, value) for key, value in group.items()}
        for group in saved["param_groups"]
    ]
    state = {
        number: {key: _on_host(key, value) for key, value in kept.items() if key != MASTER}
        for number, kept in saved["state"].items()
    }
    return {**saved, "state": state, "param_groups": groups}


def _on_host(key: str, value: Any) -> Any:
    """Return step counts where torch's own updates keep them."""
    return value.cpu() if key == "step" and isinstance(value, torch.Tensor) else value


def _with_recipe(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any] | None:
    if len(saved["param_groups"]) != len(optimizer.param_groups):
        return None  # torch says so in its own words
    groups = [
        {**group, **{key: own[key] for key in PLAIN_UPDATE if key in own}}
        for group, own in zip(saved["param_groups"], optimizer.param_groups, strict=True)
    ]
    return {**saved, "param_groups": groups}
