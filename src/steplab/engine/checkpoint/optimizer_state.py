"""An optimizer's state by the names of its parameters, so that no order can mix it up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from steplab.codec import encode
from steplab.engine.checkpoint.document import Group, OptimizerRecord
from steplab.engine.checkpoint.weights import some
from steplab.errors import Unsupported, UserError
from steplab.modules.one_pass_adamw import MASTER

# How the update is computed, not what it computes: a resumed training keeps its own choice.
IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}
NOT_SETTINGS = {"params", "param_names", *IMPLEMENTATION}


def capture(
    optimizer: Optimizer, names: Mapping[int, str]
) -> tuple[OptimizerRecord, dict[str, Tensor]]:
    """Return the plain part of an optimizer and its tensors, called `exp_avg/<parameter>`."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        name = _name(parameter, names)
        for key, value in state.items():
            if key == MASTER:
                continue  # saved once, as the model's weights
            if isinstance(value, Tensor):
                tensors[f"{key}/{name}"] = value
            else:
                values.setdefault(name, {})[key] = _as_json(value, key)
    groups = tuple(
        Group(tuple(_name(p, names) for p in group["params"]), _settings(group))
        for group in optimizer.param_groups
    )
    return OptimizerRecord(type(optimizer).__name__, groups, values), tensors


def check(
    optimizer: Optimizer,
    names: Mapping[int, str],
    record: OptimizerRecord,
    tensors: Mapping[str, Tensor],
    where: str,
) -> None:
    """Raise a UserError unless the saved state belongs to this kind and these parameters."""
    kind = type(optimizer).__name__
    if record.kind != kind:
        raise UserError(
            f"{where} holds the state of {record.kind}, but this training uses {kind}.",
            f"Train with {record.kind}, or start anew from the weights alone.",
        )
    if len(record.groups) != len(optimizer.param_groups):
        raise UserError(
            f"{where} has {len(record.groups)} parameter groups, but this training has "
            f"{len(optimizer.param_groups)}."
        )
    for index, (saved, group) in enumerate(zip(record.groups, optimizer.param_groups, strict=True)):
        own = {_name(p, names) for p in group["params"]}
        strangers = sorted(own.symmetric_difference(saved.parameters))
        if strangers:
            raise UserError(
                f"{where} was saved with other parameters in group {index}: {some(strangers)}."
            )
    known = {name for group in record.groups for name in group.parameters}
    lost = sorted(name for name in tensors if name.partition("/")[2] not in known)
    if lost:
        raise UserError(f"{where} holds state of unknown parameters: {some(lost)}.")


def apply(
    optimizer: Optimizer,
    names: Mapping[int, str],
    record: OptimizerRecord,
    tensors: Mapping[str, Tensor],
) -> None:
    """Replace the optimizer's state and settings by the checked, saved ones."""
    state: dict[str, dict[str, Any]] = {}
    for name, values in record.values.items():
        state.setdefault(name, {}).update(values)
    for path, tensor in tensors.items():
        key, _, name = path.partition("/")
        state.setdefault(name, {})[key] = tensor
    masters = {p: own[MASTER] for p, own in optimizer.state.items() if MASTER in own}
    optimizer.state.clear()
    optimizer.state.update({p: {MASTER: master} for p, master in masters.items()})
    for saved, group in zip(record.groups, optimizer.param_groups, strict=True):
        for key, value in saved.settings.items():
            group[key] = _restored(group.get(key), value)
        for parameter in group["params"]:
            own = state.get(_name(parameter, names), {})
            if own:
                optimizer.state[parameter] |= {
                    key: _placed(value, key, parameter, group)
                    if isinstance(value, Tensor)
                    else value
                    for key, value in own.items()
                }


def _placed(saved: Tensor, key: str, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Copy a tensor to where torch's optimizers expect it, with its own dtype and bits."""
    if key == "step":
        # Counters stay on the host unless the update reads them on the device.
        if group.get("fused"):
            return saved.to(parameter.device, torch.float32, copy=True)
        return saved.to(parameter.device if group.get("capturable") else "cpu", copy=True)
    if saved.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=saved.dtype, requires_grad=False).copy_(saved)
    return saved.to(parameter.device, copy=True)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _as_json(v, k) for k, v in group.items() if k not in NOT_SETTINGS}


def _as_json(value: Any, key: str) -> Any:
    try:
        return encode(_plain(value))
    except (TypeError, RuntimeError):
        raise Unsupported(
            f"A checkpoint cannot hold the optimizer's {key}, a {type(value).__name__}."
        ) from None


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()  # exact: a float of 64 bits holds every shorter one
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _restored(current: Any, saved: Any) -> Any:
    """Return the saved setting in the form of the current one."""
    if isinstance(current, Tensor):
        return current.fill_(saved)  # the same tensor: a compiled update holds on to it
    if isinstance(current, tuple):
        return tuple(_restored(c, s) for c, s in zip(current, saved, strict=True))
    return saved


def _name(parameter: Tensor, names: Mapping[int, str]) -> str:
    if id(parameter) not in names:
        raise Unsupported("The optimizer updates a tensor that is no parameter of the model.")
    return names[id(parameter)]
