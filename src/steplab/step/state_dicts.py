"""State dicts in a loop of one's own: as without the recipe, so that checkpoints fit either way.

A recipe may keep weights in 16 bits beside fp32 ones, and set how the optimizer's update runs. What
`model.state_dict()` and `optimizer.state_dict()` return has the fp32 weights under their own names
and torch's defaults for the update; what is loaded leaves the recipe's choices as they are.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from steplab.modules.optimizer import MASTER, full_weights

# Options of torch's optimizers that say how an update runs and not what it computes.
PLAIN_UPDATE = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}


def keep_state_dicts(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let both give and take state dicts that do not know of the recipe."""
    optimizer.register_state_dict_post_hook(_without_recipe)
    optimizer.register_load_state_dict_pre_hook(_with_recipe)
    whole = ExitStack()

    def widen(*_: Any) -> None:
        whole.enter_context(full_weights(optimizer))

    def round_again(*_: Any) -> None:
        whole.close()

    model.register_state_dict_pre_hook(widen)
    model.register_state_dict_post_hook(round_again)
    model.register_load_state_dict_pre_hook(widen)
    model.register_load_state_dict_post_hook(round_again)


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
