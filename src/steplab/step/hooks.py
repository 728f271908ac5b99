"""Hooks of a model that compiled or captured code would leave out, without a word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from steplab.core.errors import Unsupported

MODULE_HOOKS = {
    "_forward_hooks": "a forward hook",
    "_forward_pre_hooks": "a forward pre-hook",
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}


class HookGuard:
    """Refuses the next step where a hook would not run in it.

    The replay of a captured step runs no Python at all. Compiled code has the hooks that its
    modules had when it was compiled, in the first step; torch does not look again.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, captured: bool
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.captured = captured
        self._newest = -1  # the number that the next hook of the process had at the last look
        self._compiled: dict[int, str] | None = None
        if captured:
            self.check()

    def check(self) -> None:
        """Look at the hooks, if any was registered in the process since the last time."""
        if self._newest == RemovableHandle.next_id:
            return
        hooks = module_hooks(self.model)
        if self.captured:
            hooks |= update_hooks(self.model, self.optimizer)
            for place in hooks.values():
                raise Unsupported(
                    f"No CUDA graph: {place}, and a replay runs no Python.",
                    "Leave the hook or the graph (cuda_graph=off) out.",
                )
        if self._compiled is None:
            self._compiled = hooks
        for number in hooks.keys() - self._compiled.keys():
            raise Unsupported(
                f"{hooks[number]} that was registered after the first step, and compiled code "
                "does not see it.",
                "Register it before the first step, or leave compile out of the recipe.",
            )
        self._newest = RemovableHandle.next_id


def module_hooks(model: nn.Module) -> dict[int, str]:
    """Return where modules have hooks of the user's, by the number of the hook."""
    return {
        number: f"{name or 'the model'} has {words}"
        for name, module in model.named_modules()
        for kind, words in MODULE_HOOKS.items()
        for number in _of_the_user(getattr(module, kind))
    }


def update_hooks(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[int, str]:
    """Return the same of parameters and of the optimizer."""
    found = {
        number: f"the parameter {name} has a hook"
        for name, p in model.named_parameters()
        for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks)
        for number in _of_the_user(hooks)
    }
    for kind in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        hooks = {} if optimizer is None else getattr(optimizer, kind)
        found |= dict.fromkeys(_of_the_user(hooks), "the optimizer has a hook")
    return found


def _of_the_user(hooks: Mapping[int, Any] | None) -> list[int]:
    """Return the hooks that neither torch nor steplab has registered."""
    homes = {n: getattr(hook, "__module__", "") or "" for n, hook in (hooks or {}).items()}
    return [n for n, home in homes.items() if home.split(".")[0] not in ("torch", "steplab")]
